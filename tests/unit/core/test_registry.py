"""Which plugin types exist, and how instances get their ports."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError
from proxy.core.params import Invalid, param
from proxy.core.plugin import Filter, Plugin, PreRequest, Scorer, plugin, points_of
from proxy.core.ports import Clock, InstanceName, ManualClock
from proxy.core.registry import Registry, make_plugin, parameters_of
from proxy.core.request import InferenceRequest


@plugin("mine")
@dataclass(frozen=True, slots=True)
class Mine(Scorer):
    """A scorer with two ports."""

    clock: Clock
    name: InstanceName
    threshold: int = param(5, "a bound", at_least=0)

    def score(self, run: Any, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [0.0 for _ in endpoints]


@plugin("mine")
@dataclass(frozen=True, slots=True)
class Other(Mine):
    """Of the same type."""


PORTS = {Clock: ManualClock(), InstanceName: InstanceName("instance")}


def test_a_type_is_found_by_its_name_and_a_near_miss_gets_a_suggestion() -> None:
    registry = Registry([Mine])
    assert registry.get("mine") is Mine
    assert registry.get("mien") is None
    assert registry.suggest("mien") == "; did you mean 'mine'?"


def test_two_classes_of_one_type_are_an_error_that_names_both() -> None:
    with pytest.raises(ConfigError, match=r"two plugins of type 'mine': .*Mine, .*Other"):
        Registry([Mine, Other])


def test_the_same_class_may_be_found_twice() -> None:
    assert list(Registry([Mine, Mine])) == [Mine]


def test_types_are_listed_by_name() -> None:
    names = [cls.plugin_type for cls in Registry.discover()]
    assert names == sorted(names)


def test_a_plugin_in_the_package_exists_by_its_file() -> None:
    found = Registry.discover().get("queue-scorer")
    assert found is not None
    assert found.__module__ == "proxy.plugins.scorers.queue"


def test_ports_are_injected_and_not_parameters() -> None:
    made = make_plugin(Mine, {"threshold": 7}, "plugins.mine", PORTS)
    assert isinstance(made, Mine)
    assert (made.clock, made.name, made.threshold) == (PORTS[Clock], "instance", 7)
    assert [field.name for field in parameters_of(Mine, PORTS)] == ["threshold"]


def test_a_port_cannot_be_set_from_the_file() -> None:
    with pytest.raises(Invalid, match="unknown field 'clock'"):
        make_plugin(Mine, {"clock": 1}, "plugins.mine", PORTS)


def test_a_class_has_the_extension_points_that_it_declares() -> None:
    class Both(Filter, PreRequest):
        pass

    assert points_of(Both) == (Filter, PreRequest)
    assert points_of(Mine) == (Scorer,)


def test_a_class_that_is_no_complete_plugin_is_an_error_that_says_what_is_missing() -> None:
    @plugin("bare")
    class Bare(Scorer):
        def score(self, run: Any, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
            return []

    @plugin("of-nothing")
    @dataclass(frozen=True, slots=True)
    class OfNothing(Plugin):
        pass

    @plugin("misspelt")
    @dataclass(frozen=True, slots=True)
    class Misspelt(Scorer):
        def scores(self) -> None:
            pass

    expected: list[tuple[Any, str]] = [
        (Bare, "is not a dataclass; write @dataclass below @plugin"),
        (OfNothing, "has no extension point as a base, such as Scorer"),
        (Misspelt, "has no method 'score', which a Scorer needs"),
    ]
    for cls, fault in expected:
        with pytest.raises(ConfigError, match=f"plugin type '{cls.plugin_type}': .*{cls.__name__} {fault}"):
            Registry([cls])
