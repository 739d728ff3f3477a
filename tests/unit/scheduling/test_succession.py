"""One scheduling after another: plugins that stay, state that survives, and what a fault leaves untouched."""

from __future__ import annotations

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
from proxy.core.state import PluginState, State
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from tests.helpers.scheduling.situations import REGISTRY, ports


@plugin("remembering-scorer")
@dataclass(slots=True)
class Remembering(Scorer, PreRequest):
    """Remembers the pods it has seen."""

    state: PluginState
    factor: float = param(1.0, "of nothing")
    seen: list[Endpoint] = field(init=False)
    applied: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.seen = self.state.get("seen", list)
        self.state.at_commit(lambda: self.applied.append(self.factor))

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
    made = build(read({"plugins": list(plugins), **more}, "scheduling"), KNOWN, PORTS, draft=draft)
    draft.commit()
    return Built(made, state)


def remembering(name: str = "r", **parameters: Any) -> dict[str, Any]:
    return {"type": "remembering-scorer", "name": name, "parameters": parameters}


def test_a_plugin_with_the_same_name_type_and_parameters_is_reused() -> None:
    first = after(None, remembering(factor=2))
    second = after(first, remembering("other"), remembering(factor=2))
    assert second.instances["r"] is first.instances["r"]
    assert second.instances["other"] is not first.instances["r"]
    assert "other" not in first.instances


def test_changed_parameters_keep_the_state_and_a_changed_name_does_not() -> None:
    first = after(None, remembering())
    pod = Endpoint("a")
    first.instances["r"].pre_request(None, pod)  # type: ignore[attr-defined]
    second = after(first, remembering(factor=3), remembering("s", factor=3))
    successor, stranger = second.instances["r"], second.instances["s"]
    assert isinstance(successor, Remembering)
    assert isinstance(stranger, Remembering)
    assert successor is not first.instances["r"]
    assert (successor.seen, stranger.seen) == ([pod], [])


def test_state_lives_as_long_as_its_plugin() -> None:
    first = after(None, remembering())
    first.instances["r"].pre_request(None, Endpoint("a"))  # type: ignore[attr-defined]
    second = after(after(first, remembering()), remembering(factor=3))
    assert len(second.instances["r"].seen) == 1  # type: ignore[attr-defined]
    third = after(after(second), remembering(factor=3))
    assert third.instances["r"].seen == []  # type: ignore[attr-defined]


def test_state_changes_when_the_configuration_takes_effect() -> None:
    first = after(None, remembering())
    draft = first.state.draft()
    made = build(read({"plugins": [remembering(factor=3)]}, "scheduling"), KNOWN, PORTS, draft=draft).instances["r"]
    assert isinstance(made, Remembering)
    assert made.applied == []
    draft.commit()
    assert made.applied == [3.0]


def test_a_validated_configuration_has_no_state() -> None:
    first = after(None, remembering())
    first.instances["r"].pre_request(None, Endpoint("a"))  # type: ignore[attr-defined]
    tried = read({"plugins": [remembering(factor=3)]}, "scheduling")
    made = build(tried, KNOWN, PORTS, draft=first.state.draft(), keeps_state=False).instances["r"]
    assert isinstance(made, Remembering)
    assert (made.seen, made.applied) == ([], [3.0])


def test_a_plugin_with_changed_context_is_created_again() -> None:
    def profiles(*names: str) -> dict[str, Any]:
        return {"schedulingProfiles": [{"name": name, "plugins": []} for name in names]}

    handler = {"type": "listing-handler", "name": "h", "parameters": {}}
    first = after(None, handler, **profiles("a"))
    assert after(first, handler, **profiles("a")).instances["h"] is first.instances["h"]
    second = after(first, handler, **profiles("a", "b")).instances["h"]
    assert isinstance(second, Listing)
    assert tuple(second.names) == ("a", "b")


def test_a_fault_leaves_the_previous_one_unchanged() -> None:
    first = after(None, remembering())
    before = dict(first.instances)
    with pytest.raises(ConfigError):
        after(first, remembering(factor=7), {"type": "no-such-type"})
    assert dict(first.instances) == before
    assert after(first, remembering()).instances["r"] is before["r"]
