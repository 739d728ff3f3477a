"""The result of `kvlane import`, and readers of foreign files and command lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from proxy import yaml_source
from proxy.core.errors import ConfigError, MissingPackage
from proxy.settings import from_mapping

T = TypeVar("T")

Section = dict[str, Any]

Converted = tuple[str, Callable[[Any], Any]]
"""The path of a setting, and the conversion of a foreign value to its value."""


def converted(convert: Callable[[Any], T], value: Any, what: str) -> T:
    try:
        return convert(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what}: {value!r} is no number") from None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A piece of the original, and the reason why it is not in the settings."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(slots=True)
class Imported:
    """The state of one import. `missing` are pieces without an equivalent, `faulty` pieces with a mistake, `needless`
    pieces that need no equivalent, `packages` plugins whose package is not installed, `notes` tasks for the user."""

    system: str
    settings: Section = field(default_factory=dict)
    missing: list[LeftOut] = field(default_factory=list)
    faulty: list[LeftOut] = field(default_factory=list)
    packages: list[LeftOut] = field(default_factory=list)
    needless: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """Set a value at a dotted path."""
        *sections, key = path.split(".")
        place = self.settings
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value

    def put_converted(self, rule: Converted, value: Any, what: str) -> None:
        """Put the value at the path of this rule. Raise ValueError if it cannot be converted."""
        path, convert = rule
        self.put(path, converted(convert, value, what))

    @property
    def sources(self) -> list[Section]:
        """The static pods, and each set of cluster pods as one source."""
        pods = self.settings.get("pods", {})
        return [*pods.get("static", []), *([pods["kubernetes"]] if "kubernetes" in pods else [])]

    def pod(self, url: str, **more: Any) -> Section:
        """Return the static pod of this URL; create it if necessary. Raise ValueError for an invalid URL."""
        url = url.rstrip("/").removesuffix("/v1")
        url = url if "://" in url else f"http://{url}"
        pods: list[Section] = self.settings.setdefault("pods", {}).setdefault("static", [])
        pod = next((one for one in pods if one["url"] == url), None)
        if pod is None:
            pod = {"url": url}
            pods.append(pod)
        pod.update({key: value for key, value in more.items() if value})
        return pod

    def cluster(self, selector: str, port: object, namespace: object, engine: str = "") -> None:
        """Add the pods of a Kubernetes cluster. The defaults are the usual port and the proxy's namespace."""
        wanted = {"selector": selector, "ports": [port] if port else None, "namespace": namespace, "engine": engine}
        self.put("pods.kubernetes", {key: value for key, value in wanted.items() if value})
        self.note("let kvlane's service account get, list and watch pods: see pods.kubernetes in configuration.md")

    def lacks(self, what: str, why: str) -> None:
        self.missing.append(LeftOut(what, why))

    def needs_no(self, what: str, why: str) -> None:
        self.needless.append(LeftOut(what, why))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def check(self) -> None:
        """Raise ConfigError if the settings are invalid. A missing package is not an error: the settings may be for
        another machine."""
        try:
            from_mapping(self.settings)
        except ConfigError as error:
            absent = [one for one in error.problems if isinstance(one, MissingPackage)]
            if others := [one for one in error.problems if one not in absent]:
                raise ConfigError(others) from None
            self.packages = [LeftOut(one.path, one.message) for one in absent]

    @property
    def incomplete(self) -> list[tuple[str, LeftOut]]:
        """What does not work as in the original, each with its category."""
        kinds = (("No equivalent", self.missing), ("Faulty", self.faulty), ("Missing package", self.packages))
        return [(kind, one) for kind, found in kinds for one in found]

    def text(self) -> str:
        """Return valid YAML, with the omitted pieces in comments."""
        lines = [f"Imported from {self.system}. `kvlane check -c` shows what it amounts to."]
        lines += _listed("To do:", self.notes)
        lines += _listed("Has no equivalent:", self.missing)
        lines += _listed("Faulty, and left out:", self.faulty)
        lines += _listed("Missing package:", self.packages)
        lines += _listed("Not needed:", self.needless)
        comments = "".join(f"# {line}\n" for line in lines)
        ordered = {key: self.settings[key] for key in (*ORDER, *self.settings) if key in self.settings}
        return comments + yaml.safe_dump(ordered, sort_keys=False, width=120, allow_unicode=True)


ORDER = ("listen", "admin", "pods", "scheduling", "flowControl", "disaggregation", "models", "reliability", "security")
"""The first sections of the output, in the order of the reference."""


def _listed(title: str, items: Sequence[object]) -> list[str]:
    return [title, *(f"  {' '.join(str(item).split())}" for item in items)] if items else []


TEMPLATE = "it looks like the template of a chart; take what `helm template` makes of it"


class InvalidDocument(Exception):
    """The input does not have the expected format; the message says why."""


def read(path: Path) -> Any:
    """Read YAML or JSON; references to the environment stay unresolved. Raise InvalidDocument."""
    found = read_all(path)
    if len(found) > 1:
        raise InvalidDocument(f"{path} holds several documents")
    return found[0] if found else None


def read_all(path: Path) -> list[Any]:
    """Read a file that may contain several documents, as manifests do. Raise InvalidDocument."""
    try:
        text = yaml_source.text_of(path)
    except ConfigError as error:
        raise InvalidDocument(str(error)) from None
    return documents(text, str(path))


def documents(text: str, source: str) -> list[Any]:
    """Parse a text as `read_all` does."""
    try:
        return yaml_source.read_documents(text, source)
    except ConfigError as error:
        raise InvalidDocument(f"{source} is no YAML: {TEMPLATE}" if "{{" in text else f"is no YAML: {error}") from None


def mapping(value: Any, what: str) -> Mapping[str, Any]:
    """Return the value as a mapping; None is an empty one. Raise InvalidDocument."""
    if not isinstance(value, Mapping | None):
        raise InvalidDocument(f"{what} must be a mapping")
    return value or {}


def items(value: Any, what: str) -> list[Any]:
    """Return the value as a list; None is an empty one. Raise InvalidDocument."""
    if not isinstance(value, list | None):
        raise InvalidDocument(f"{what} must be a list")
    return value or []


MANY = -1
"""Number of words of a flag that takes all words up to the next flag."""

Found = dict[str, list[list[str]]]
"""The words of every occurrence of a flag, in order."""


def read_flags(words: Sequence[str], arities: Mapping[str, int]) -> tuple[Found, Found]:
    """Return known and unknown flags with their words, after the program's name. Raise InvalidDocument."""
    found: Found = {}
    unknown: Found = {}
    rest = list(words)
    while rest and not rest[0].startswith("--"):
        rest.pop(0)
    if words and not rest:
        raise InvalidDocument("there is no flag in it; write it as it is written for the other program")
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--"):
            raise InvalidDocument(f"'{flag}' belongs to no flag")
        arity, taken = arities.get(flag, MANY), [value] if equals else []
        while not equals and rest and len(taken) != arity and not rest[0].startswith("--"):
            taken.append(rest.pop(0))
        if not equals and len(taken) < arity:
            raise InvalidDocument(f"{flag} wants {arity} words")
        (found if flag in arities else unknown).setdefault(flag, []).append(taken)
    return found, unknown
