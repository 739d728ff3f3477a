"""Plugin instances from their configuration, with the ports they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from proxy.core import params
from proxy.core.errors import Problem
from proxy.core.params import Invalid
from proxy.core.plugin import Plugin

Ports = Mapping[Any, Any]
"""Annotated type -> the value that fields of this type get."""


def parameters_of(cls: type[Plugin], ports: Ports) -> list[dataclasses.Field[Any]]:
    """The fields a YAML file may set."""
    kinds = params.hints(cls)
    return [field for field in dataclasses.fields(cls) if field.init and kinds[field.name] not in ports]  # type: ignore[arg-type]


def make(cls: type[Plugin], parameters: Any, path: str, ports: Ports) -> Plugin:
    """Raises params.Invalid with every fault of the parameters."""
    try:
        return params.build(cls, parameters, cls.plugin_type, injected(cls, ports))
    except Invalid as invalid:
        faults = ((problem.path.removeprefix(cls.plugin_type), problem.message) for problem in invalid.problems)
        raise Invalid(*(Problem(path + below, message) for below, message in faults)) from None


def injected(cls: type[Plugin], ports: Ports) -> dict[str, Any]:
    """Return the fields that are ports, with their values."""
    kinds = params.hints(cls)
    return {
        field.name: ports[kinds[field.name]]
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.init and kinds[field.name] in ports
    }
