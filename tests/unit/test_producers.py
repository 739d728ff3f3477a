"""How long the data producers of a request may take, and what happens where they or other plugins fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, EndpointRemoved, plugin
from proxy.core.ports import Clock, ManualClock, Random
from proxy.core.registry import PluginFaults, Registry
from proxy.core.request import DataKey, InferenceRequest
from proxy.pool import PRODUCE_DEADLINE, Producers
from proxy.scheduling.build import build
from proxy.scheduling.document import read

DONE: DataKey[bool] = DataKey("Done")


@plugin("slow-producer")
@dataclass(frozen=True, slots=True)
class Slow(DataProducer):
    """Takes longer than all producers have together."""

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        await asyncio.sleep(1.2 * PRODUCE_DEADLINE)
        request.state.write(DONE, True)


@plugin("patient-producer")
@dataclass(frozen=True, slots=True)
class Patient(Slow):
    takes: ClassVar[float] = 60.0


def raised(producer: DataProducer, complaint: str, error: Exception) -> None:
    raise AssertionError(complaint) from error


async def produced(producer: DataProducer) -> bool | None:
    request = InferenceRequest("id", "/", "model")
    await Producers([producer], raised, lambda one: one.plugin_type).run(request, ())
    return request.state.read(DONE)


async def test_a_producer_gets_its_declared_time() -> None:
    assert await produced(Slow()) is None
    assert await produced(Patient()) is True


@plugin("broken-producer")
@dataclass(frozen=True, slots=True)
class Broken(DataProducer):
    waits: ClassVar[bool] = False

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        endpoints.sort()  # type: ignore[attr-defined]


@plugin("broken-slow-producer")
@dataclass(frozen=True, slots=True)
class BrokenSlow(Broken):
    waits: ClassVar[bool] = True


async def test_a_raising_producer_is_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, counted = ManualClock(), list[str]()
    names = {"quick": "broken-producer", "slow": "broken-slow-producer"}
    built = build(
        read({"plugins": [{"name": name, "type": of} for name, of in names.items()]}),
        Registry([*Registry.discover(), Broken, BrokenSlow]),
        {Clock: clock, Random: random.Random(0)},
        faults=PluginFaults(clock, lambda name, fault: counted.append(name)),
    )
    producers = Producers(built.producers, built.raised, built.name_of)
    for _ in range(4):
        await producers.run(InferenceRequest("id", "/", "model"), [Endpoint("a")])
        clock.advance(20.0)
    assert counted == ["quick", "slow"] * 4
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["quick", "slow"] * 2


@plugin("forgetful")
@dataclass(frozen=True, slots=True)
class Forgetful(EndpointRemoved):
    fails: bool = param(False, "raise an error")
    forgotten: list[Endpoint] = field(default_factory=list, init=False)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        if self.fails:
            raise ZeroDivisionError
        self.forgotten.append(endpoint)


def test_a_plugin_that_fails_to_drop_a_pod_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    clock, counted = ManualClock(), list[tuple[str, str]]()
    bad = {"name": "bad", "type": "forgetful", "parameters": {"fails": True}}
    plugins = [bad, {"name": "good", "type": "forgetful"}]
    built = build(
        read({"plugins": plugins}),
        Registry([*Registry.discover(), Forgetful]),
        {Clock: clock, Random: random.Random(0)},
        faults=PluginFaults(clock, lambda name, fault: counted.append((name, fault))),
    )
    pod, good = Endpoint("a"), built.instances["good"]
    for _ in range(3):
        built.forget(pod)
    assert isinstance(good, Forgetful)
    assert good.forgotten == [pod] * 3
    assert counted == [("bad", "raised")] * 3
    assert len(caplog.records) == 1
