"""What an import has made so far: settings, and what of the original is not in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from proxy.settings import from_mapping

Section = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Left:
    """A piece of the original, and why it is not in the settings."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(slots=True)
class Imported:
    """Lives as long as one import. `missing` has no equivalent, `needless` needs none, `notes` are to be done."""

    system: str
    settings: Section = field(default_factory=dict)
    missing: list[Left] = field(default_factory=list)
    needless: list[Left] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, path: str, value: Any) -> None:
        """At a dotted path."""
        *sections, key = path.split(".")
        place = self.settings
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value

    def pod(self, url: str, **more: Any) -> Section:
        """A static pod; the one there is if the URL is known. Raises ValueError for a URL that is none."""
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
        """Pods of a Kubernetes cluster; without a port the usual one, without a namespace that of the proxy."""
        wanted = {"selector": selector, "ports": [port] if port else None, "namespace": namespace, "engine": engine}
        self.put("pods.kubernetes", {key: value for key, value in wanted.items() if value})
        self.note("let kvlane's service account get, list and watch pods: see pods.kubernetes in configuration.md")

    def lacks(self, what: str, why: str) -> None:
        self.missing.append(Left(what, why))

    def needs_no(self, what: str, why: str) -> None:
        self.needless.append(Left(what, why))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def check(self) -> None:
        """Raises ConfigError if it would not be taken."""
        from_mapping(self.settings)

    def text(self) -> str:
        """YAML that loads, what was left out in comments."""
        lines = [f"Imported from {self.system}. `kvlane check -c` shows what it amounts to."]
        lines += _listed("To do:", self.notes)
        lines += _listed("Has no equivalent:", self.missing)
        lines += _listed("Not needed:", self.needless)
        comments = "".join(f"# {line}\n" for line in lines)
        return comments + yaml.safe_dump(ordered(self.settings), sort_keys=False, width=120, allow_unicode=True)


ORDER = ("listen", "admin", "pods", "scheduling", "flowControl", "disaggregation", "models", "reliability", "security")


def ordered(settings: Mapping[str, Any]) -> Section:
    """Sections in the order of the reference."""
    known = [key for key in ORDER if key in settings]
    return {key: settings[key] for key in [*known, *(key for key in settings if key not in known)]}


def _listed(title: str, items: Sequence[object]) -> list[str]:
    return [title, *(f"  {' '.join(str(item).split())}" for item in items)] if items else []
