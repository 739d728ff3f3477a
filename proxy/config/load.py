"""Load a configuration from its file, or from text that replaces the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxy import yaml_source
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Unexpanded, join, unknown_key
from proxy.scheduling.document import KIND
from proxy.settings import Settings, from_mapping

ANOTHER_FILE = (
    "the admin port accepts a file that is not in effect only if it requires a key: set admin.apiKey,"
    " or name the file in the configuration file"
)
"""Error for a text that names another file, whose content an error message or a service could reveal."""

_DOCUMENT_KEYS = ("plugins", "schedulingProfiles")

EXAMPLE = "pods: {static: [{url: http://vllm-0:8000}]}"

OLDER = "if it was written for an earlier release of llm-d, `kvlane import endpoint-picker` rewrites it"

_OLDER = re.compile(r"^unknown f.*(known are|no fields|belongs to scheduling\.plugins)|was renamed to|no longer exists")
"""Messages about documents of earlier releases."""

WRAPPED = f"it holds an {KIND}, which `kvlane import endpoint-picker` takes out of a manifest or of a chart's values"

_OF_OTHERS = {
    "model_list": "`kvlane import litellm` converts a LiteLLM configuration",
    "static_backends": "`kvlane import production-stack` converts the dynamic configuration of its router",
    "service_discovery": "`kvlane import production-stack` converts the dynamic configuration of its router",
}
"""Hint for the configuration of another router, by one of its keys."""

BODY = Path("request body")

UNEXPANDED = "contains ${…}, which is expanded only if the admin port requires a key: set admin.apiKey"


def load(path: Path, environ: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Load kvlane's own file, or an EndpointPickerConfig; `overrides` take precedence. Raise ConfigError."""
    return from_text(yaml_source.text_of(path), path, environ, overrides)


def from_text(
    text: str,
    path: Path,
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    reads_files: bool = True,
) -> Settings:
    """Load the text of a file. Unless it `reads_files`, a section in another file is a fault. Raise ConfigError."""
    data, missing = yaml_source.read_partly(text, str(path), environ)
    if not isinstance(data, Mapping):
        what = "is empty" if data is None else "must hold a mapping of sections"
        raise ConfigError([Problem(str(path), f"{what}; write for example: {EXAMPLE}")])
    is_document = data.get("kind") == KIND or any(key in data for key in _DOCUMENT_KEYS)
    if is_document:
        data, missing = {"scheduling": data}, [Problem(join("scheduling", one.path), one.message) for one in missing]

    def read(other: Path) -> Any:
        if not reads_files:
            raise ConfigError([Problem(str(other), ANOTHER_FILE)])
        return yaml_source.read(yaml_source.text_of(other), str(other), environ)

    found: list[Problem] = []
    whole = _with_scheduling_files(data, path, read, found)
    try:
        settings = from_mapping(whole, overrides)
    except ConfigError as error:
        from proxy.config.unknown_keys import advised  # only for faults

        problems = _with_missing([*found, *_located(advised(error.problems), data)], missing)
        hint = ""
        if is_document and any(_OLDER.search(problem.message) for problem in problems):
            hint = f"{path}: {OLDER}"
        elif f"kind: {KIND}" in text and "scheduling" not in data and "pools" not in data:
            hint = f"{path}: {WRAPPED}"
        elif known := next((key for key in _OF_OTHERS if key in data), None):
            hint = f"{path}: {_OF_OTHERS[known]}"
        raise ConfigError(problems, hint) from None
    if found or missing:
        raise ConfigError([*found, *missing])
    return settings


def _with_missing(found: Sequence[Problem], missing: Sequence[Problem]) -> list[Problem]:
    """Return the faults, and the faults of environment variables except below keys that do not exist. A value without
    its variable has no other fault."""
    paths, messages = {one.path for one in missing}, {one.message for one in found}
    unknown = [join(one.path, key) for one in found if (key := unknown_key(one))]
    others = [one for one in missing if one.message not in messages]
    return [
        *(one for one in found if one.path not in paths or one in missing),
        *(one for one in others if not any(re.match(rf"{re.escape(key)}($|[.\[])", one.path) for key in unknown)),
    ]


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The reader of the configuration file, or of text in its place; `overrides` take precedence over both."""

    file: Path | None = None
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    def again(self) -> Settings:
        """Read the file again. Raise ConfigError."""
        if self.file is None:
            return from_mapping({}, self.overrides)
        return load(self.file, self.environ, self.overrides)

    def of(self, text: str, expands: bool) -> Settings:
        """Read a text in place of the file. Raise ConfigError."""
        if "${" in text and not expands:
            raise ConfigError([Problem(str(BODY), UNEXPANDED)])
        path = BODY if self.file is None else self.file.parent / BODY
        return from_text(text, path, self.environ, self.overrides, reads_files=expands)


def scheduling_files(text: bytes, path: Path) -> list[Path]:
    """Return the files that `scheduling.file` names in the text of this file; none if the text is invalid."""
    found: list[Path] = []
    if b"file" in text:
        with suppress(ConfigError, UnicodeDecodeError):
            data = yaml_source.read_data(text.decode())
            _with_scheduling_files(data if isinstance(data, Mapping) else {}, path, found.append, [])
    return found


def _with_scheduling_files(
    data: Mapping[str, Any], path: Path, read: Callable[[Path], Any], faults: list[Problem]
) -> Mapping[str, Any]:
    """Return the data with every `scheduling.file`, of the top level and of pools, replaced by its content. With a
    fault, which is added to `faults`, the section is left out."""

    def replaced(pool: Any, where: str) -> Any:
        section = pool.get("scheduling") if isinstance(pool, Mapping) else None
        if not isinstance(section, Mapping) or "file" not in section:
            return pool
        if len(section) > 1:
            faults.append(Problem(where, "has a file and keys of its own; keep one of them"))
        elif not isinstance(section["file"], Unexpanded):
            try:
                return {**pool, "scheduling": read(path.parent / str(section["file"]))}
            except ConfigError as error:
                faults.extend(error.in_file_of(join(where, "file")).problems)
        return {key: value for key, value in pool.items() if key != "scheduling"}

    if isinstance(pools := data.get("pools"), Mapping):
        data = {**data, "pools": {name: replaced(pool, f"pools.{name}.scheduling") for name, pool in pools.items()}}
    return replaced(data, "scheduling")  # type: ignore[no-any-return]


def _located(problems: Sequence[Problem], data: Mapping[str, Any]) -> list[Problem]:
    """Return the problems; a problem of a section in another file names the file."""
    files = {at.removesuffix("file"): file for at, file in texts(data) if _SCHEDULING_FILE.fullmatch(at)}
    found = []
    for problem in problems:
        file = next((file for section, file in files.items() if f"{problem.path}.".startswith(section)), "")
        found.append(replace(problem, message=f"{problem.message} (in {file})") if file else problem)
    return found


_SCHEDULING_FILE = re.compile(r"(?:pools\.[^.]+\.)?scheduling\.file")


def named_files(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each setting that names a file."""
    for at, text in texts(value, path):
        if _FILE.search(at) and not text.startswith(("http://", "https://")):
            yield at, text


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the value of each setting that is a text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(item, join(path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts(item, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, value


_FILE = re.compile(
    r"(?:^|\.)(?:apiKeysFile|tokenFile|caFile|jwks|(?:pods|record)\.file|tls\.(?:ca|cert|key|clientCa))$"
)
