"""Attributes of pods: custom values of a scrape, by name and, where several deliver one, by `name/producer`."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.endpoint import Endpoint


def attribute_reader(name: str, producer: str) -> Callable[[Endpoint], float | None]:
    """A function that gives the attribute of an endpoint, None where it is missing."""
    qualified = f"{name}/{producer}"

    def read(endpoint: Endpoint) -> float | None:
        attributes = endpoint.metrics.attributes
        value = attributes.get(qualified) if producer else None
        return attributes.get(name) if value is None else value

    return read
