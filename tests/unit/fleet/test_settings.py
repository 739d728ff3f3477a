"""The `pods` section."""

from typing import Any

import pytest

from proxy.core.errors import ConfigError
from proxy.core.params import load
from proxy.fleet.settings import DnsSettings, PodSettings, PodSources, found_pod


def faults(data: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(PodSources, data, "pods")
    return [str(problem) for problem in caught.value.problems]


def test_without_a_section_there_are_no_pods_and_the_documented_defaults() -> None:
    settings = load(PodSources, None)
    assert (settings.static, settings.file, settings.dns) == ((), None, None)
    assert (settings.refresh.interval, settings.refresh.timeout, settings.refresh.max_core) == (0.25, 1.0, 0.05)


def test_a_pod_has_all_its_keys() -> None:
    pod = {
        "url": "https://pod-0:8000/",
        "name": "first",
        "role": "decode",
        "labels": {"gpu": "h100"},
        "weight": 2,
        "models": ["m"],
        "engine": "SGLang",
        "apiKey": "secret",
    }
    settings = load(PodSources, {"static": [pod], "refresh": {"interval": "1s", "maxCore": 0.1}})
    assert settings.static == (
        PodSettings(
            "https://pod-0:8000",
            "first",
            role="decode",
            labels={"gpu": "h100"},
            weight=2.0,
            models=("m",),
            engine="sglang",
            api_key="secret",
        ),
    )
    assert settings.refresh.interval == 1.0


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://pod-0:8000", "pod-0:8000"),
        ("http://pod-0", "pod-0:80"),
        ("https://pod-0/", "pod-0:443"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("http://10.0.0.1:8000/base", "10.0.0.1:8000"),
    ],
)
def test_a_pod_is_named_by_host_and_port_by_default(url: str, name: str) -> None:
    assert PodSettings(url=url).name == name
    assert PodSettings(url=url, name="other").name == "other"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "pod-0:8000",
        "ftp://a",
        "http://",
        "http://a?b",
        "http://a#b",
        "http://u:p@a",
        "http://a:x",
        "http://a b",
        "http://a:99999",
        "http://[::1",
    ],
)
def test_an_invalid_url_is_refused_with_its_path(url: str) -> None:
    (fault,) = faults({"static": [{"url": "http://fine"}, {"url": url}]})
    assert fault.startswith("pods.static[1].url: ")


def test_all_faults_are_reported_with_their_paths() -> None:
    data = {
        "static": [
            {"name": "a"},
            {"url": "http://b", "weight": 0},
            {"url": "http://c", "engine": "vlm", "lables": {}},
            "x",
        ],
        "refresh": {"interval": 0, "maxCore": 2, "attributes": {}},
    }
    found = faults(data)
    assert "pods.static[0].url: is required" in found
    assert any(fault.startswith("pods.static[1].weight: must be more than 0") for fault in found)
    assert any("did you mean 'vllm'?" in fault for fault in found)
    assert any("did you mean 'labels'?" in fault for fault in found)
    assert any(fault.startswith("pods.static[3]: must be a mapping") for fault in found)
    assert any(fault.startswith("pods.refresh.interval") for fault in found)
    assert any(fault.startswith("pods.refresh.maxCore") for fault in found)


def test_indistinguishable_pods_are_refused() -> None:
    pods = [
        {"url": "http://a"},
        {"url": "http://a/"},
        {"url": "http://b", "name": "x"},
        {"url": "http://c", "name": "x"},
    ]
    assert faults({"static": pods}) == [
        "pods.static[1].url: 'http://a' is taken by pods.static[0]",
        "pods.static[3].name: 'x' is taken by pods.static[2]",
    ]


def test_an_attribute_that_is_not_a_metric_is_refused() -> None:
    (fault,) = faults({"refresh": {"attributes": {"temp": "gpu{"}}})
    assert fault.startswith("pods.refresh.attributes: ")
    assert "closing brace" in fault


def test_a_path_of_metrics_must_start_with_a_slash() -> None:
    assert faults({"refresh": {"path": "metrics"}}) == ["pods.refresh.path: 'metrics' must start with /"]
    assert faults({"refresh": {"dcgm": {"path": ""}}}) == ["pods.refresh.dcgm.path: '' must start with /"]


def test_settings_of_a_dns_name_apply_to_each_of_its_pods() -> None:
    dns = load(DnsSettings, {"name": "vllm", "port": 8000, "role": "prefill", "weight": 2, "apiKey": "k"})
    pod = found_pod(dns, "10.0.0.1", dns.port)
    assert (pod.url, pod.name, pod.role, pod.weight, pod.api_key) == (
        "http://10.0.0.1:8000",
        "10.0.0.1:8000",
        "prefill",
        2.0,
        "k",
    )
    assert found_pod(dns, "fd00::1", dns.port).url == "http://[fd00::1]:8000"


def test_an_empty_key_from_an_unset_variable_is_none() -> None:
    assert PodSettings("http://a", api_key="").api_key is None
