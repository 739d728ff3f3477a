"""Objectives and rewrites of a cluster, in addition to the file's."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.ports import SystemClock
from proxy.models.cluster import ClusterNames
from proxy.models.settings import ClusterObjects, ModelSettings, Objective, Rewrite, Target
from tests.helpers.kubernetes.server import FakeApiServer, Object, objectives_in, rewrites_in
from tests.helpers.waiting import until


def objective(name: str, priority: int | None, pool: str = "llama") -> Object:
    spec = {"poolRef": {"name": pool}, **({} if priority is None else {"priority": priority})}
    return {"metadata": {"name": name}, "spec": spec}


def rewrite(name: str, *rules: Object, born: str = "2026-01-01T00:00:00Z", pool: str = "llama") -> Object:
    metadata = {"name": name, "creationTimestamp": born}
    return {"metadata": metadata, "spec": {"poolRef": {"name": pool}, "rules": list(rules)}}


def rule(targets: Mapping[str, int | None], *models: str) -> Object:
    listed = [{"modelRewrite": name, **({"weight": weight} if weight else {})} for name, weight in targets.items()]
    return {"matches": [{"model": {"type": "Exact", "value": model}} for model in models], "targets": listed}


class Followed:
    def __init__(self, names: ClusterNames, settings: ModelSettings) -> None:
        self._names, self._file = names, settings

    @property
    def settings(self) -> ModelSettings:
        return self._names.added_to(self._file)

    @property
    def priorities(self) -> dict[str, int]:
        return {name: one.priority for name, one in self.settings.objectives.items()}


@asynccontextmanager
async def following(server: FakeApiServer, file: ModelSettings | None = None, **keys: Any) -> AsyncIterator[Followed]:
    wanted = ClusterObjects(server=server.url, namespace="ns", **keys)
    async with ClusterNames(wanted, SystemClock(), random.Random(1), retry=0.01) as names:
        yield Followed(names, file or ModelSettings())


async def test_an_objective_has_its_priority_and_0_where_it_has_none() -> None:
    async with FakeApiServer() as server:
        server.put(objectives_in(), objective("chat", 10))
        server.put(objectives_in(), objective("plain", None))
        async with following(server) as followed:
            await until(lambda: followed.priorities == {"chat": 10, "plain": 0})
            server.put(objectives_in(), objective("chat", -5))
            server.delete(objectives_in(), "plain")
            await until(lambda: followed.priorities == {"chat": -5})


async def test_the_file_takes_precedence() -> None:
    file = ModelSettings(objectives={"chat": Objective(1)}, rewrites=(Rewrite("own", "m", targets=(Target("x"),)),))
    async with FakeApiServer() as server:
        server.put(objectives_in(), objective("chat", 10))
        server.put(objectives_in(), objective("batch", -1))
        server.put(rewrites_in(), rewrite("theirs", rule({"y": None}, "m")))
        async with following(server, file) as followed:
            await until(
                lambda: followed.priorities == {"chat": 1, "batch": -1} and len(followed.settings.rewrites) == 2
            )
            assert [one.name for one in followed.settings.rewrites] == ["own", "theirs"]


async def test_a_rule_is_one_rewrite_per_matched_model_and_older_objects_come_first() -> None:
    async with FakeApiServer() as server:
        server.put(rewrites_in(), rewrite("young", rule({"z": None}), rule({}), born="2026-02-01T00:00:00Z"))
        server.put(rewrites_in(), rewrite("old", rule({"x": 9, "y": 1}, "a", "b")))
        async with following(server) as followed:
            await until(lambda: len(followed.settings.rewrites) == 3)
            split = (Target("x", 9), Target("y", 1))
            assert followed.settings.rewrites == (
                Rewrite("old", "a", targets=split),
                Rewrite("old", "b", targets=split),
                Rewrite("young", "", targets=(Target("z"),)),
            )


async def test_objects_of_other_inference_pools_are_ignored() -> None:
    async with FakeApiServer() as server:
        server.put(objectives_in(), objective("chat", 10))
        server.put(objectives_in(), objective("far", 3, pool="other"))
        server.put(rewrites_in(), rewrite("far", rule({"x": None}), pool="other"))
        async with following(server, inference_pool="llama") as followed:
            await until(lambda: bool(followed.priorities))
            assert followed.priorities == {"chat": 10}
            assert followed.settings.rewrites == ()


async def test_the_older_api_group_is_watched_if_configured() -> None:
    async with FakeApiServer() as server:
        group = "inference.networking.x-k8s.io"
        server.put(objectives_in(group=group), objective("chat", 10))
        async with following(server, group=group) as followed:
            await until(lambda: followed.priorities == {"chat": 10})


@pytest.mark.parametrize(
    ("field", "value"),
    [("creationTimestamp", 5), ("model", 5), ("modelRewrite", 5), ("weight", "x"), ("weight", -1)],
)
async def test_a_rewrite_with_a_field_of_another_type_is_left_out_and_the_others_count(field: str, value: Any) -> None:
    async with FakeApiServer() as server:
        server.put(rewrites_in(), rewrite("good", rule({"x": None})))
        broken = rewrite("broken", rule({"y": None}, "m"))
        target = broken["spec"]["rules"][0]["targets"][0]
        match field:
            case "creationTimestamp":
                broken["metadata"][field] = value
            case "model":
                broken["spec"]["rules"][0]["matches"][0]["model"]["value"] = value
            case _:
                target[field] = value
        server.put(rewrites_in(), broken)
        async with following(server) as followed:
            await until(lambda: bool(followed.settings.rewrites))
            assert [each.name for each in followed.settings.rewrites] == ["good"]


async def test_an_object_without_its_pool_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as server:
        server.put(objectives_in(), {"metadata": {"name": "broken"}, "spec": {"priority": 1}})
        server.put(objectives_in(), objective("chat", 10))
        async with following(server) as followed:
            await until(lambda: followed.priorities == {"chat": 10})
    assert "failed to read inferenceobjectives.llm-d.ai broken" in caplog.text
