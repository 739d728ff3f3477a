"""Names and fallbacks on the data path: every attempt that began ends, whichever model it was for."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from proxy.core import params
from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadGateway, QueueFull, UnknownModel
from proxy.core.ports import Admission
from proxy.core.request import InferenceRequest
from proxy.fleet.settings import PodSettings
from proxy.models.resolver import Resolver
from proxy.models.settings import ModelSettings
from proxy.pool import Pool
from tests.unit.test_gateway import FakeClientRequest, World, good, refused

SETTINGS = {"aliases": {"gpt": "m"}, "fallbacks": {"m": ["n"], "never": ["m"]}}


def client_request(model: str, **more: str) -> FakeClientRequest:
    fields = "".join(f',"{name}":"{value}"' for name, value in more.items())
    return FakeClientRequest(body=f'{{"model":"{model}","messages":[]{fields}}}'.encode())


def world() -> World:
    """Pods `a` and `b` serve `m`, `z` serves `n`."""
    made = World(names="ab")
    made.fleet.reached(made.fleet.add(PodSettings("http://z:1", "z", models=("n",))))
    made.gateway.resolver = made.gateway.model_names = Resolver(params.load(ModelSettings, SETTINGS), random.Random(1))
    return made


async def refused_but_by_z(attempt: Attempt) -> None:
    await (good if attempt.endpoint.name == "z" else refused)(attempt)


async def test_the_pod_and_its_model_are_reported() -> None:
    it = world()
    (attempt,) = await it.serve(good, client_request=client_request("gpt"))
    assert attempt.request.body == b'{"model":"m","messages":[]}'
    assert ("x-kvlane-model", "m") in attempt.response_headers
    (attempt,) = await it.serve(good, client_request=client_request("m"))
    assert "x-kvlane-model" not in dict(attempt.response_headers)
    it.gateway.expose_endpoint = False
    (attempt,) = await it.serve(good, client_request=client_request("gpt"))
    assert not any(name.startswith("x-kvlane") for name, _ in attempt.response_headers)


async def test_after_all_pods_of_a_model_failed_the_next_model_is_tried() -> None:
    it = world()
    *failed, last = await it.serve(refused_but_by_z, client_request=client_request("gpt"))
    assert {attempt.endpoint.name for attempt in failed} == {"a", "b"}
    assert (last.endpoint.name, last.request.model, last.number) == ("z", "n", 0)
    it.assert_that_nothing_is_left()


async def test_an_unknown_model_uses_its_fallback_and_is_unknown_without_one() -> None:
    it = world()
    (attempt,) = await it.serve(good, client_request=client_request("never"))
    assert attempt.request.model == "m"
    with pytest.raises(UnknownModel):
        await it.serve(good, client_request=client_request("else"))


async def test_if_the_fallback_fails_too_the_request_fails() -> None:
    it = world()
    with pytest.raises(BadGateway):
        await it.serve(refused, client_request=client_request("m"))
    it.assert_that_nothing_is_left()


async def test_a_stored_response_has_no_fallback() -> None:
    it = world()
    pod = it.fleet.get("a")
    assert pod is not None
    it.bindings.bind("resp_1", pod)
    with pytest.raises(BadGateway):
        await it.serve(refused_but_by_z, client_request=client_request("m", previous_response_id="resp_1"))
    it.assert_that_nothing_is_left()


class Authenticator(Admission):
    """An admission that is closed to some models."""

    def __init__(self, *closed: str) -> None:
        self.closed = closed
        self.inside = 0
        self.seen: list[str] = []

    @asynccontextmanager
    async def admit(self, request: InferenceRequest) -> AsyncIterator[None]:
        self.seen.append(request.model)
        if request.model in self.closed:
            raise QueueFull("no room")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        assert self.inside == 1
        return endpoints

    def attempt_started(self, attempt: Attempt) -> None:
        assert self.inside == 1

    def has_spare_capacity(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        return False


def admit_by(it: World, admission: Admission) -> None:
    it.gateway = replace(it.gateway, all_pools=[Pool(it.fleet, it.scheduling, [admission])])


@pytest.mark.parametrize("closed", [["m"], []])
async def test_each_model_admits_separately(closed: list[str]) -> None:
    it = world()
    admit_by(it, authenticator := Authenticator(*closed))
    await it.serve(refused_but_by_z, client_request=client_request("gpt"))
    assert authenticator.seen == ["m", "n"]
    assert authenticator.inside == 0
    it.assert_that_nothing_is_left()


async def test_a_request_that_every_model_refuses_gets_the_refusal() -> None:
    it = world()
    admit_by(it, authenticator := Authenticator("m", "n"))
    with pytest.raises(QueueFull):
        await it.serve(good, client_request=client_request("gpt"))
    assert authenticator.seen == ["m", "n"]
