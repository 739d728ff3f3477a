import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError
from proxy.fleet.dialects import DIALECTS, Dialect, Dialects, specs
from proxy.settings import from_mapping

OURS = Dialect(waiting=specs("ours:waiting"))


def test_the_engine_label_precedes_the_engine_of_the_pod() -> None:
    pod = Endpoint("a", engine="vllm", labels={"llm-d.ai/engine-type": "sglang"})
    assert Dialects().of(pod) is DIALECTS["sglang"]


def test_an_unknown_label_keeps_the_engine_of_the_pod() -> None:
    pod = Endpoint("a", engine="llamacpp", labels={"llm-d.ai/engine-type": "abacus"})
    assert Dialects().of(pod) is DIALECTS["llamacpp"]


def test_a_document_may_add_engines_and_choose_the_default() -> None:
    parameters = {
        "defaultEngine": "ours",
        "engineConfigs": [{"name": "ours", "queuedRequestsSpec": "ours:waiting", "customMetrics": []}],
    }
    plugins = [{"type": "max-score-picker"}, {"type": "core-metrics-extractor", "parameters": parameters}]
    dialects = from_mapping({"scheduling": {"plugins": plugins}}).dialects
    assert dialects.of(Endpoint("a")) == OURS


def test_a_spec_that_does_not_parse_is_a_fault_with_its_path() -> None:
    parameters = {"engineConfigs": [{"name": "ours", "queuedRequestsSpec": "{"}]}
    plugins = [{"type": "core-metrics-extractor", "parameters": parameters}]
    with pytest.raises(ConfigError, match=r"core-metrics-extractor\.parameters\.engineConfigs\.ours"):
        from_mapping({"scheduling": {"plugins": plugins}})
