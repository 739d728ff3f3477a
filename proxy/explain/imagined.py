"""A request that nobody has sent, and other weights for the scheduling that would decide on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from proxy.core.errors import BadRequest
from proxy.core.params import suggestion
from proxy.explain.explained import parts
from proxy.scheduling.build import Scheduling
from proxy.scheduling.document import Document, PluginEntry, PluginRef, ProfileEntry

PATHS: Mapping[str, str] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}
"""Where a body with this field goes, unless a path is given."""

_FIELDS = ("request", "path", "headers", "pool", "profile", "scheduling", "weights")


@dataclass(frozen=True, slots=True)
class Imagined:
    """`body` is what the client would send. `profile` is to decide alone; `scheduling` is a section of that name in the
    place of the one in effect, `weights` are those of scorers, by name, in all profiles that have them."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    pool: str = ""
    profile: str = ""
    scheduling: Any = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, asked: Any, query: Mapping[str, str]) -> Imagined:
        """Of `{"request": …}` and what else there may be beside it; or of the request itself. Raises BadRequest."""
        if not isinstance(asked, Mapping):
            raise BadRequest("The body must be an object: a request, or what has one in `request`.")
        given = dict(asked) if "request" in asked else {"request": asked}
        for name in given:
            if name not in _FIELDS:
                raise BadRequest(f"There is no '{name}' beside the request{suggestion(name, _FIELDS)}.", param=name)
        given.update({name: query[name] for name in ("pool", "profile") if name in query})
        return cls(
            _path(given),
            _body(given["request"]),
            _headers(given.get("headers") or {}),
            _text(given, "pool"),
            _text(given, "profile"),
            given.get("scheduling"),
            _weights(given.get("weights") or {}),
        )


def _body(request: Any) -> bytes:
    try:
        return orjson.dumps(request)
    except TypeError:  # values of JSON that it cannot write are nested too deeply
        raise BadRequest("The request is nested too deeply.", param="request") from None


def reweighed(document: Document, made: Scheduling, weights: Mapping[str, float]) -> Document:
    """The document that `made` was made of, with other weights of some scorers. Raises BadRequest."""
    scorers = sorted({name for of_profile in parts(made).values() for name in of_profile})
    for name in weights:
        if name not in scorers:
            raise BadRequest(f"No profile has the scorer '{name}'{suggestion(name, scorers)}.", param=f"weights.{name}")
    written = {entry.label for entry in document.plugins}
    injected = [PluginEntry(one.type, one.name) for one in made.effective.plugins if one.name not in written]
    profiles = []
    for profile in made.effective.profiles:
        refs = tuple(PluginRef(use.ref, weights.get(use.ref, use.weight)) for use in profile.uses)
        profiles.append(ProfileEntry(profile.name, refs, profile.shadow, f"schedulingProfiles.{profile.name}"))
    return replace(document, plugins=(*document.plugins, *injected), profiles=tuple(profiles))


def _path(given: Mapping[str, Any]) -> str:
    """Raises BadRequest."""
    if given.get("path"):
        return _text(given, "path")
    request = given["request"]
    for name, path in PATHS.items():
        if isinstance(request, Mapping) and name in request:
            return path
    raise BadRequest("The request has none of messages, prompt and input; name its `path`.", param="path")


def _headers(given: Any) -> Mapping[str, str]:
    """Raises BadRequest."""
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise BadRequest("headers must be an object of texts.", param="headers")
    return {"content-type": "application/json", **{name.lower(): value for name, value in given.items()}}


def _text(given: Mapping[str, Any], name: str) -> str:
    """Raises BadRequest."""
    value = given.get(name) or ""
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be text.", param=name)
    return value


def _weights(given: Any) -> Mapping[str, float]:
    """Raises BadRequest."""
    if not isinstance(given, Mapping):
        raise BadRequest("weights must be an object with a number for each scorer.", param="weights")
    for name, weight in given.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight < 0:
            raise BadRequest(f"weights.{name} must be a number of 0 or more.", param=f"weights.{name}")
    return {name: float(weight) for name, weight in given.items()}
