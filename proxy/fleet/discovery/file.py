"""A YAML list of pods in a file, read again whenever it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.core.errors import ConfigError, Problem, Unreadable
from proxy.core.files import WatchedFiles
from proxy.core.params import Invalid, build, join, param
from proxy.fleet.discovery import Source
from proxy.fleet.settings import PodSettings, bracketed, duplicates
from proxy.yaml_source import read_data, text_of

log = logging.getLogger(__name__)

_DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class _AddressEntry:
    """A pod as llm-d's file discovery writes it; host names and IPv6 addresses are fine too."""

    address: str = param(doc="IP address or host name")
    port: str = param(doc="port of the engine")
    name: str = param("", "name of the pod")
    namespace: str = param(_DEFAULT_NAMESPACE, "namespace of the pod; a part of its name unless it is the default")
    labels: Mapping[str, str] = param({}, "labels of the pod")

    def __post_init__(self) -> None:
        if not self.port.isdecimal() or not 0 < int(self.port) < 65536:
            raise ValueError(f"port: {self.port!r} is not a port")

    def pod(self) -> PodSettings:
        namespace = "" if self.namespace == _DEFAULT_NAMESPACE else f"{self.namespace}/"
        return PodSettings(
            url=f"http://{bracketed(self.address.strip('[]'))}:{self.port}",
            name=f"{namespace}{self.name}" if self.name else "",
            labels=self.labels,
        )


def parse_pods(text: str) -> tuple[PodSettings, ...]:
    """A list of entries as in `pods.static`, or as llm-d has them (`name, namespace, address, port, labels`), mixed as
    one likes. Raises ConfigError with every fault."""
    entries = read_data(text)
    if isinstance(entries, dict) and entries.keys() == {"pods"}:
        entries = entries["pods"]
    if entries is None:
        raise ConfigError([Problem("", "is empty; write [] for no pods")])
    if not isinstance(entries, list):
        raise ConfigError([Problem("", "must be a list of pods")])
    pods: list[PodSettings] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        try:
            pods.extend(_parse_entry(entry, f"[{index}]").expanded())
        except Invalid as invalid:
            problems.extend(invalid.problems)
    if problems or (problems := duplicates(pods)):
        raise ConfigError(problems)
    return tuple(pods)


def _parse_entry(entry: Any, path: str) -> PodSettings:
    if not isinstance(entry, dict) or "address" not in entry:
        return build(PodSettings, entry, path)
    try:
        return build(_AddressEntry, entry, path).pod()
    except ValueError as error:
        raise Invalid(Problem(join(path, "address"), str(error).removeprefix("url: "))) from None


class FileSource(Source):
    """A file that is missing, empty or broken takes no pods away; its faults are logged once."""

    name = "file"
    interval = 1.0

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file = WatchedFiles([path])

    async def poll(self) -> Sequence[PodSettings] | None:
        try:
            return await asyncio.to_thread(self._file.read_if_changed, self._load)
        except Unreadable as error:
            log.warning("pods.file: %s; keeping its pods", error)
        except ConfigError as error:
            log.error("pods.file: %s is invalid; keeping its pods:\n%s", self._path, error)
        return None

    def _load(self) -> Sequence[PodSettings]:
        return parse_pods(text_of(self._path))
