"""What becomes of the model, the priority and the tenant of a request."""

from __future__ import annotations

import random
from typing import Any

import pytest

from proxy.core import params
from proxy.core.errors import (
    AllFailed,
    BadGateway,
    BadRequest,
    ConfigError,
    Evicted,
    NoEndpoints,
    QueueFull,
    RateLimited,
    RequestError,
    Saturated,
    ShuttingDown,
    UnknownModel,
)
from proxy.core.ports import IDENTITY, Identity
from proxy.core.request import DataKey, InferenceRequest, Naming
from proxy.models.resolver import Resolver
from proxy.models.settings import ModelSettings
from proxy.telemetry.metrics import Catalogue, Counter, Family


def resolver(counts: Catalogue | None = None, pools: tuple[str, ...] = (), **settings: Any) -> Resolver:
    return Resolver(params.load(ModelSettings, settings), random.Random(4), counts, pools=pools)


def counted(family: Family[Counter]) -> dict[tuple[str, ...], float]:
    return {labels: cell.value for labels, cell in family.cells.items()}


def request(model: str = "m", **headers: str) -> InferenceRequest:
    body = b'{"model": "%b", "messages": []}' % model.encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return InferenceRequest("r", "/v1/chat/completions", model, body=body, headers=named)


KEY = Identity("k", "acme", frozenset(["m", "gpt-*"]), frozenset(["batch"]))


def test_an_alias_is_replaced_in_the_body_too() -> None:
    resolved = resolver(aliases={"gpt-4o": "llama"}).resolve(request("gpt-4o"), None)
    assert (resolved.model, resolved.body) == ("llama", b'{"model": "llama", "messages": []}')


def test_unchanged_names_keep_the_bytes_of_the_body() -> None:
    incoming = request()
    assert resolver(aliases={"x": "y"}).resolve(incoming, None).body is incoming.body


def test_requests_are_split_by_weight() -> None:
    rules = [{"model": "m", "targets": [{"model": "a", "weight": 3}, {"model": "b", "weight": 1}, {"model": "c"}]}]
    it = resolver(rewrites=rules)
    drawn = [it.resolve(request(), None).model for _ in range(400)]
    assert 260 < drawn.count("a") < 340
    assert drawn.count("c") == 0
    even = resolver(rewrites=[{"targets": [{"model": "a"}, {"model": "b"}]}])
    assert 160 < [even.resolve(request(), None).model for _ in range(400)].count("a") < 240


def test_rules_for_a_model_precede_general_ones_and_headers_must_match() -> None:
    it = resolver(
        rewrites=[
            {"targets": [{"model": "any"}]},
            {"model": "m", "headers": {"x-canary": "1"}, "targets": [{"model": "new"}]},
            {"model": "m", "targets": [{"model": "old"}]},
        ]
    )
    assert it.resolve(request("m"), None).model == "old"
    assert it.resolve(request("m", x_canary="1"), None).model == "new"
    assert it.resolve(request("n"), None).model == "any"


def test_rules_match_the_model_of_an_alias() -> None:
    it = resolver(aliases={"gpt": "m"}, rewrites=[{"model": "m", "targets": [{"model": "new"}]}])
    assert it.resolve(request("gpt"), None).model == "new"


@pytest.mark.parametrize("header", ["x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"])
def test_a_header_names_the_model_of_a_client_without_a_key(header: str) -> None:
    it = resolver(aliases={"m": "n"})
    assert it.resolve(request(**{header: "special"}), None).model == "special"
    assert it.resolve(request(**{header: "special"}), KEY).model == "n"


def test_an_objective_gives_the_priority() -> None:
    it = resolver(objectives={"batch": {"priority": -1}, "chat": {"priority": 5}, "default": {"priority": 1}})
    assert it.resolve(request(), None).priority == 1
    assert it.resolve(request(x_llm_d_inference_objective="chat"), None).priority == 5
    assert it.resolve(request(x_gateway_inference_objective="batch"), None).priority == -1
    assert it.resolve(request(x_llm_d_inference_objective="unknown"), None).priority == 0
    assert it.resolve(request(x_llm_d_inference_objective="batch"), KEY).priority == -1
    assert it.resolve(request(x_llm_d_inference_objective="chat"), KEY).priority == 1, "the key may not name it"


def test_the_tenant_is_the_keys_or_an_unknown_clients_header() -> None:
    it = resolver()
    assert it.resolve(request(x_llm_d_inference_fairness_id="t"), None).tenant == "t"
    assert it.resolve(request(x_llm_d_inference_fairness_id="t"), KEY).tenant == "acme"
    assert it.resolve(request(), None).tenant == ""
    assert len(it.resolve(request(x_llm_d_inference_fairness_id="t" * 5000), None).tenant) == 256


def test_a_key_gets_the_models_that_it_may_use() -> None:
    it = resolver(aliases={"gpt-4o": "secret"})
    assert it.resolve(request("gpt-4o"), KEY).model == "secret"
    with pytest.raises(UnknownModel):
        it.resolve(request("secret"), KEY)


def test_a_body_that_is_not_json_cannot_be_rewritten() -> None:
    incoming = InferenceRequest("r", "/v1/audio/transcriptions", "whisper", body=b"--boundary")
    with pytest.raises(BadRequest, match="whisper"):
        resolver(aliases={"whisper": "other"}).resolve(incoming, None)


def test_the_field_of_a_form_is_rewritten() -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper\r\n--b\r\nthe rest'
    headers = {"content-type": "multipart/form-data; boundary=b"}
    incoming = InferenceRequest("r", "/v1/audio/transcriptions", "whisper", body=form, headers=headers)
    resolved = resolver(aliases={"whisper": "whisper-large"}).resolve(incoming, None)
    assert resolved.body == form.replace(b"whisper", b"whisper-large")


def test_a_request_without_body_and_model_is_unchanged() -> None:
    incoming = InferenceRequest("r", "/v1/anything", "")
    assert resolver(rewrites=[{"targets": [{"model": "a"}]}]).resolve(incoming, None).model == ""


def test_a_session_keeps_its_target() -> None:
    rule = {"model": "m", "sticky": "x-session", "targets": [{"model": "a", "weight": 1}, {"model": "b", "weight": 1}]}
    one, other = resolver(rewrites=[rule]), resolver(rewrites=[rule])
    drawn = {str(number): one.resolve(request(x_session=str(number)), None).model for number in range(200)}
    assert 70 < list(drawn.values()).count("a") < 130
    assert drawn == {who: other.resolve(request(x_session=who), None).model for who in drawn}, "in another process too"
    assert one.resolve(request(x_session="caf\udce9"), None).model in ("a", "b"), "a header that is no UTF-8"
    assert {one.resolve(request(), None).model for _ in range(20)} == {"a", "b"}, "who has none is drawn by itself"


def test_rewrites_are_counted_by_rule() -> None:
    counts = Catalogue("test")
    rules = [
        {"name": "canary", "model": "m", "targets": [{"model": "new"}]},
        {"model": "n", "targets": [{"model": "x"}]},
    ]
    it = resolver(counts, aliases={"gpt": "llama"}, rewrites=rules)
    for incoming in ("m", "n", "gpt", "other"):
        it.resolve(request(incoming), None)
    it.resolve(request(x_llm_d_model_name_rewrite="made up"), None)
    labels = [("canary", "new"), ("n", "x"), ("alias", "llama"), ("header", "")]
    assert counted(counts.rewrites) == dict.fromkeys(labels, 1)


def test_the_requested_name_is_kept_only_if_another_model_may_respond() -> None:
    it = resolver(aliases={"gpt": "m"}, fallbacks={"m": ["small", "tiny"]})
    assert it.resolve(request("gpt"), None).naming == Naming("gpt", ("small", "tiny"))
    assert it.resolve(request("m"), None).naming == Naming("m", ("small", "tiny"))
    assert it.resolve(request("other"), None).naming is None


def test_aliases_are_listed_while_their_model_is() -> None:
    cards = [{"id": "m", "owned_by": "vllm"}, {"id": "n"}]
    rules = [{"model": "virtual", "targets": [{"model": "away"}, {"model": "n"}]}, {"targets": [{"model": "m"}]}]
    it = resolver(aliases={"gpt": "m", "gone": "away", "n": "m"}, rewrites=rules)
    assert it.listed(cards) == [*cards, {"id": "virtual"}, {"id": "gpt", "owned_by": "vllm"}]


class Pods:
    """Send: the models in `failing` fail, all others respond."""

    def __init__(self, **failing: RequestError) -> None:
        self.failing = failing
        self.requests: list[InferenceRequest] = []

    async def send(self, request: InferenceRequest) -> None:
        self.requests.append(request)
        request.state.write(MARK, request.model)
        if error := self.failing.get(request.model):
            raise error

    @property
    def models(self) -> list[str]:
        return [request.model for request in self.requests]


MARK: DataKey[str] = DataKey("Mark")


@pytest.mark.parametrize(
    "error", [NoEndpoints("none"), UnknownModel("big"), QueueFull("full"), Saturated("full"), AllFailed("tried 3")]
)
async def test_without_capacity_the_next_model_is_tried(error: RequestError) -> None:
    counts = Catalogue("test")
    it = resolver(counts, aliases={"gpt": "big"}, fallbacks={"big": ["mid", "small"]})
    pods = Pods(big=error, mid=error)
    await it.try_each(it.resolve(request("gpt"), None), pods.send)
    assert pods.models == ["big", "mid", "small"]
    assert pods.requests[2].body == b'{"model": "small", "messages": []}'
    assert counted(counts.fallbacks) == {("big", "mid"): 1, ("mid", "small"): 1}


async def test_a_fallback_may_name_a_pool_and_otherwise_the_whole_name_is_a_model() -> None:
    counts = Catalogue("test")
    it = resolver(counts, ("default", "spare"), fallbacks={"m": ["m@spare", "n@home", "n"]})
    pods = Pods(m=NoEndpoints("none"), **{"n@home": NoEndpoints("none")})
    incoming = it.resolve(request("m"), None)
    await it.try_each(incoming, pods.send)
    assert [(one.model, one.naming and one.naming.pool) for one in pods.requests] == [
        ("m", ""),
        ("m", "spare"),
        ("n@home", ""),
        ("n", ""),
    ]
    assert pods.requests[1].body is incoming.body
    assert counted(counts.fallbacks)["m", "m@spare"] == 1


def test_a_rewrite_may_name_the_pool_of_its_target() -> None:
    it = resolver(rewrites=[{"model": "m", "targets": [{"model": "m", "pool": "spare"}]}])
    incoming = request("m")
    resolved = it.resolve(incoming, None)
    assert (resolved.model, resolved.body, resolved.naming) == ("m", incoming.body, Naming("m", pool="spare"))


@pytest.mark.parametrize(
    "error",
    [
        RateLimited("enough", 1.0),
        ShuttingDown(),
        BadGateway("lost"),
        BadRequest("bad"),
        Evicted("its client may have a part of the response"),
    ],
)
async def test_fallbacks_end_if_another_model_cannot_help_or_the_body_is_gone(error: RequestError) -> None:
    it = resolver(fallbacks={"big": ["small"]})
    pods = Pods(big=error)
    with pytest.raises(type(error)):
        await it.try_each(it.resolve(request("big"), None), pods.send)
    assert pods.models == ["big"]


async def test_if_all_fail_the_error_has_the_clients_name() -> None:
    it = resolver(aliases={"gpt": "big"}, fallbacks={"big": ["small"]})
    pods = Pods(big=UnknownModel("big"), small=NoEndpoints("No pod that serves the model `small` is ready."))
    with pytest.raises(NoEndpoints, match="model `gpt` is ready"):
        await it.try_each(it.resolve(request("gpt"), None), pods.send)
    pods.failing["small"] = UnknownModel("small")
    with pytest.raises(UnknownModel, match="model `gpt` does not exist"):
        await it.try_each(it.resolve(request("gpt"), None), pods.send)


async def test_an_unknown_fallback_does_not_hide_why_the_model_could_not_be_served() -> None:
    it = resolver(aliases={"gpt": "big"}, fallbacks={"big": ["typo"]})
    pods = Pods(big=Saturated("All pods of `big` are busy."), typo=UnknownModel("typo"))
    with pytest.raises(Saturated, match="All pods of `gpt` are busy"):
        await it.try_each(it.resolve(request("gpt"), None), pods.send)
    assert pods.models == ["big", "typo"]


async def test_the_next_model_gets_the_client_and_nothing_else() -> None:
    it = resolver(fallbacks={"m": ["small"]})
    incoming = it.resolve(request("m"), KEY)
    incoming.state.write(IDENTITY, KEY)
    pods = Pods(m=NoEndpoints("none"))
    await it.try_each(incoming, pods.send)
    assert pods.requests[1].state == {IDENTITY: KEY, MARK: "small"}


async def test_a_form_without_a_model_keeps_its_own_error() -> None:
    it = resolver(fallbacks={"m": ["small"]})
    form = InferenceRequest("r", "/v1/audio/transcriptions", "m", body=b"--b", headers={"content-type": "multipart/x"})
    with pytest.raises(NoEndpoints):
        await it.try_each(it.resolve(form, None), Pods(m=NoEndpoints("none")).send)


@pytest.mark.parametrize(
    "settings",
    [
        {"aliases": {"a": "b", "b": "c"}},
        {"fallbacks": {"a": ["b", "a"]}},
        {"aliases": {"a": "b"}, "fallbacks": {"a": ["c"]}},
    ],
)
def test_names_without_a_model_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        params.load(ModelSettings, settings)


def test_a_target_of_weight_0_gets_nothing() -> None:
    it = resolver(rewrites=[{"model": "m", "targets": [{"model": "stable"}, {"model": "canary", "weight": 0}]}])
    assert {it.resolve(request(), None).model for _ in range(50)} == {"stable"}


@pytest.mark.parametrize(
    "rule", [{"model": "m"}, {"targets": [{"weight": 1}]}, {"targets": [{"model": "a", "weight": 0}]}]
)
def test_a_rule_without_targets_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        params.load(ModelSettings, {"rewrites": [rule]})


def test_sessions_of_agents_are_tenants_where_none_is_named() -> None:
    it = Resolver(ModelSettings(), random.Random(4), sessions=("session-id",))
    assert it.resolve(request(session_id="s"), None).tenant == "s"
    assert it.resolve(request(session_id="s", x_llm_d_inference_fairness_id="t"), None).tenant == "t"
    assert it.resolve(request(session_id="s"), KEY).tenant == "acme"
