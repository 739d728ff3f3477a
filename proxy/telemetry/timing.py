"""The timing wrapper: a plugin of the same interface, every call of which is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from proxy.core.plugin import Plugin
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.instruments import Histogram

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "DataProducer": "produce",
        "Filter": "filter",
        "Scorer": "score",
        "Picker": "pick",
        "PreRequest": "pre_request",
        "PostResponse": "post_response",
    }
)
"""Extension point -> what is timed of it. A profile handler's plan is a dialogue: its time is that of the decision."""

EVERY = 64
"""One call in so many goes through the wrappers, the others to the plugins: a request that is timed takes 60,000
instructions more."""

_PROMISES = ("plugin_type", "provides", "requires", "waits", "takes", "exhausts")
"""What a plugin says about itself; its wrapper says the same."""


class Timing:
    """Hands out wrappers. `perf_counter` gives seconds of a clock fine enough for microseconds."""

    def __init__(self, catalogue: Catalogue, perf_counter: Callable[[], float]) -> None:
        self._catalogue = catalogue
        self._perf_counter = perf_counter

    def wrap(self, plugin: Plugin, point: type, profile: str, name: str) -> Plugin:
        """What is called in the plugin's place at one extension point, timed under its configured name; the plugin
        itself where nothing is timed."""
        method = METHODS.get(point.__name__)
        if method is None:
            return plugin
        cell = self._catalogue.plugin_seconds.cell(point.__name__, plugin.plugin_type, name)
        timed = _timed_async if method == "produce" else _timed
        members = {promise: getattr(plugin, promise) for promise in _PROMISES if hasattr(plugin, promise)}
        members[method] = staticmethod(timed(getattr(plugin, method), cell, self._perf_counter))
        return cast(Plugin, type("Timed" + type(plugin).__name__, (point,), members)())


def _timed(call: Callable[..., Any], cell: Histogram, perf_counter: Callable[[], float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        started = perf_counter()
        try:
            return call(*args)
        finally:
            cell.observe(perf_counter() - started)

    return timed


def _timed_async(call: Callable[..., Any], cell: Histogram, perf_counter: Callable[[], float]) -> Callable[..., Any]:
    async def timed(*args: Any) -> Any:
        started = perf_counter()
        try:
            return await call(*args)
        finally:
            cell.observe(perf_counter() - started)

    return timed
