"""One scheduling after another: what stays itself, what is adopted, and what a fault leaves untouched."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError
from proxy.core.params import param
from proxy.core.plugin import Plugin, PreRequest, ProfileHandler, Scorer, plugin
from proxy.core.ports import ProfileNames
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest
from proxy.core.state import State
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from tests.helpers.scheduling.situations import REGISTRY, ports


@plugin("remembering-scorer")
@dataclass(slots=True)
class Remembering(Scorer, PreRequest):
    """Remembers the pods it has seen."""

    factor: float = param(1.0, "of nothing")
    seen: list[Endpoint] = field(default_factory=list, init=False)

    def adopt(self, predecessor: Remembering) -> None:
        if self.factor < 0:
            raise RuntimeError("cannot")
        self.seen = predecessor.seen

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [0.0] * len(endpoints)

    def pre_request(self, attempt: Any, endpoint: Endpoint) -> None:
        self.seen.append(endpoint)


@plugin("listing-handler")
@dataclass(frozen=True, slots=True)
class Listing(ProfileHandler):
    """Knows the names of all profiles."""

    names: ProfileNames

    def plan(self, request: InferenceRequest) -> Any:
        raise AssertionError


KNOWN, PORTS = Registry([*REGISTRY, Remembering, Listing]), ports()


@dataclass
class Built:
    """A scheduling, and the state that it was built around."""

    scheduling: Scheduling
    state: State

    @property
    def instances(self) -> Mapping[str, Plugin]:
        return self.scheduling.instances


def after(predecessor: Built | None, *plugins: dict[str, Any], **more: Any) -> Built:
    state = State() if predecessor is None else predecessor.state
    draft = state.draft()
    made = build(read({"plugins": list(plugins), **more}, "scheduling"), KNOWN, PORTS, keep=draft.get)
    if predecessor is not None:
        draft.at_commit(lambda: made.succeed(predecessor.scheduling))
    draft.commit()
    return Built(made, state)


def remembering(name: str = "r", **parameters: Any) -> dict[str, Any]:
    return {"type": "remembering-scorer", "name": name, "parameters": parameters}


def test_a_plugin_of_the_same_name_type_and_parameters_is_the_same() -> None:
    first = after(None, remembering(factor=2))
    second = after(first, remembering("other"), remembering(factor=2))
    assert second.instances["r"] is first.instances["r"]
    assert second.instances["other"] is not first.instances["r"]
    assert "other" not in first.instances


def test_one_with_other_parameters_adopts_what_is_known_and_one_of_another_name_does_not() -> None:
    first = after(None, remembering())
    pod = Endpoint("a")
    first.instances["r"].pre_request(None, pod)  # type: ignore[attr-defined]
    second = after(first, remembering(factor=3), remembering("s", factor=3))
    adopter, stranger = second.instances["r"], second.instances["s"]
    assert isinstance(adopter, Remembering)
    assert isinstance(stranger, Remembering)
    assert adopter is not first.instances["r"]
    assert (adopter.seen, stranger.seen) == ([pod], [])


def test_who_cannot_adopt_begins_anew_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    first = after(None, remembering())
    first.instances["r"].pre_request(None, Endpoint("a"))  # type: ignore[attr-defined]
    with caplog.at_level(logging.ERROR):
        second = after(first, remembering(factor=-1))
    assert second.instances["r"].seen == []  # type: ignore[attr-defined]
    assert "r cannot take over" in caplog.text


def test_one_that_was_told_something_else_than_it_would_be_now_is_made_anew() -> None:
    def profiles(*names: str) -> dict[str, Any]:
        return {"schedulingProfiles": [{"name": name, "plugins": []} for name in names]}

    handler = {"type": "listing-handler", "name": "h", "parameters": {}}
    first = after(None, handler, **profiles("a"))
    assert after(first, handler, **profiles("a")).instances["h"] is first.instances["h"]
    second = after(first, handler, **profiles("a", "b")).instances["h"]
    assert isinstance(second, Listing)
    assert tuple(second.names) == ("a", "b")


def test_a_fault_leaves_the_one_before_as_it_was() -> None:
    first = after(None, remembering())
    before = dict(first.instances)
    with pytest.raises(ConfigError):
        after(first, remembering(factor=7), {"type": "no-such-type"})
    assert dict(first.instances) == before
    assert after(first, remembering()).instances["r"] is before["r"]
