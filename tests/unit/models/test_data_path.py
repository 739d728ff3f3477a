"""Names and fallbacks on the data path: every leg that began ends, whichever model it was for."""

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
from proxy.core.ports import Gate
from proxy.core.request import InferenceRequest
from proxy.fleet.settings import PodSettings
from proxy.models.resolver import Resolver
from proxy.models.settings import ModelSettings
from proxy.pool import Pool
from tests.unit.models.test_resolver import Counts
from tests.unit.test_gateway import FakeCall, World, good, refused

SETTINGS = {"aliases": {"gpt": "m"}, "fallbacks": {"m": ["n"], "never": ["m"]}}


def asking(model: str, **more: str) -> FakeCall:
    fields = "".join(f',"{name}":"{value}"' for name, value in more.items())
    return FakeCall(body=f'{{"model":"{model}","messages":[]{fields}}}'.encode())


def world() -> World:
    """Pods `a` and `b` serve `m`, `z` serves `n`."""
    made = World(names="ab")
    made.fleet.reached(made.fleet.add(PodSettings("http://z:1", "z", models=("n",))))
    made.gateway.resolver = made.gateway.names = Resolver(
        params.load(ModelSettings, SETTINGS), random.Random(1), Counts()
    )
    return made


async def refused_but_by_z(attempt: Attempt) -> None:
    await (good if attempt.endpoint.name == "z" else refused)(attempt)


async def test_the_pod_is_told_of_and_so_is_its_model() -> None:
    it = world()
    (leg,) = await it.serve(good, call=asking("gpt"))
    assert leg.request.body == b'{"model":"m","messages":[]}'
    assert ("x-kvlane-model", "m") in leg.response_headers
    (leg,) = await it.serve(good, call=asking("m"))
    assert "x-kvlane-model" not in dict(leg.response_headers)
    it.gateway.expose_endpoint = False
    (leg,) = await it.serve(good, call=asking("gpt"))
    assert not any(name.startswith("x-kvlane") for name, _ in leg.response_headers)


async def test_pods_that_all_fail_are_followed_by_those_of_the_next_model() -> None:
    it = world()
    *failed, last = await it.serve(refused_but_by_z, call=asking("gpt"))
    assert {leg.endpoint.name for leg in failed} == {"a", "b"}
    assert (last.endpoint.name, last.request.model, last.number) == ("z", "n", 0)
    it.assert_that_nothing_is_left()


async def test_a_model_that_no_pod_has_named_has_its_fallback_and_one_without_is_unknown() -> None:
    it = world()
    (leg,) = await it.serve(good, call=asking("never"))
    assert leg.request.model == "m"
    with pytest.raises(UnknownModel):
        await it.serve(good, call=asking("else"))


async def test_where_the_fallback_fails_too_the_request_has_failed() -> None:
    it = world()
    with pytest.raises(BadGateway):
        await it.serve(refused, call=asking("m"))
    it.assert_that_nothing_is_left()


async def test_a_stored_response_is_not_asked_of_another_model() -> None:
    it = world()
    pod = it.fleet.get("a")
    assert pod is not None
    it.bindings.bind("resp_1", pod)
    with pytest.raises(BadGateway):
        await it.serve(refused_but_by_z, call=asking("m", previous_response_id="resp_1"))
    it.assert_that_nothing_is_left()


class Authenticator(Gate):
    """A gate that is closed to some models."""

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

    def spares(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        return False


def admit_by(it: World, gate: Gate) -> None:
    it.gateway = replace(it.gateway, all_pools=[Pool(it.fleet, it.scheduling, [gate])])


@pytest.mark.parametrize("closed", [["m"], []])
async def test_each_model_is_let_in_by_itself(closed: list[str]) -> None:
    it = world()
    admit_by(it, door := Authenticator(*closed))
    await it.serve(refused_but_by_z, call=asking("gpt"))
    assert door.seen == ["m", "n"]
    assert door.inside == 0
    it.assert_that_nothing_is_left()


async def test_who_finds_all_doors_closed_is_told_so() -> None:
    it = world()
    admit_by(it, door := Authenticator("m", "n"))
    with pytest.raises(QueueFull):
        await it.serve(good, call=asking("gpt"))
    assert door.seen == ["m", "n"]
