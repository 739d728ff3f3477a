"""Typed dataclasses from YAML. Every fault is collected with its path, and an unknown key gets a suggestion."""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from enum import Enum
from functools import cache
from operator import ge, gt, le
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from proxy.core.errors import ConfigError, Problem
from proxy.core.request import DataKey

Duration = NewType("Duration", float)
"""Seconds. Written `250ms`, `15s`, `5m`, `1h30m` (Go's notation), `7d`, or as a number of seconds."""

Size = NewType("Size", int)
"""Bytes or a count. Written `64MiB`, `10Gi`, `1k` (Kubernetes' notation), or as a whole number."""

Moment = NewType("Moment", float)
"""Seconds since the Unix epoch. Written `2027-01-31`, which is the start of that day, or `2027-01-31T18:00:00Z`; UTC by
default."""

_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d)")
_DURATIONS = re.compile(rf"(?:{_DURATION.pattern})+")
_SIZE_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kMGTPE", 1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?)\s*(|[kKMGTPE]|[KMGTPE]i)B?")


def check_path(path: str) -> None:
    """Raise ValueError, for the key `path`, if the path of a URL does not start with a slash."""
    if not path.startswith("/"):
        raise ValueError(f"path: {path!r} must start with /")


def parse_duration(text: str) -> Duration:
    """Return seconds. Raise ValueError with an example."""
    if text == "0":  # the only number without a unit in Go's notation
        return Duration(0.0)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        if text.startswith("-") and _DURATION.fullmatch(text, 1):
            raise ValueError("a duration is not negative")
        without_spaces = "".join(text.split())
        is_spaced = without_spaces != text and _DURATIONS.fullmatch(without_spaces)
        examples = without_spaces if is_spaced else "250ms, 15s, 5m, 1h30m or 7d"
        raise ValueError(f"{text!r} is not a duration{_variable(text) or f'; write {examples}'}")
    return Duration(sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts))


def parse_size(text: str) -> Size:
    """Return bytes. Raise ValueError with an example."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size{_variable(text) or '; write 64MiB, 10Gi, 1k or a whole number'}")
    number, unit = match.groups()
    return Size(int(min(float(number) * _SIZE_UNITS["k" if unit == "K" else unit], sys.float_info.max)))


def moment(value: str | date) -> Moment:
    """Return seconds since the Unix epoch. Raise ValueError with an example."""
    try:
        read = datetime.fromisoformat(value if isinstance(value, str) else value.isoformat())
        return Moment((read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise ValueError(f"{str(value)!r} is no date or time; write 2027-01-31 or 2027-01-31T18:00:00Z") from None


REMOVED: Mapping[str, str] = {
    "autoscale.pools.*.history": "it is always 1000 decisions",
    "autoscale.prometheus.timeout": "it is always 5 s",
    "models.kubernetes.retry": "it is always 500 ms",
    "models.kubernetes.timeout": "it is always 10 s",
    "models.kubernetes.watch": "it is always 5 minutes",
    "pods.dns.tls": "write pods.tls, or tls of a static pod that differs",
    "pods.kubernetes.retry": "it is always 500 ms",
    "pods.kubernetes.timeout": "it is always 10 s",
    "pods.kubernetes.tls": "write pods.tls, or tls of a static pod that differs",
    "pods.kubernetes.watch": "it is always 5 minutes",
    "pods.warmup.concurrency": "it is always 2 prompts at a time",
    "pods.warmup.maxBytes": "it is always 4 MiB",
    "pods.warmup.sample": "it is always one response in 8",
    "pods.warmup.sharedBy": "it is always 8 requests",
    "pods.warmup.timeout": "it is always 1 minute",
    "reliability.breaker.probes": "it is always 1 request",
    "replicas.interval": "it is always 10 ms",
    "security.jwt.leeway": "it is always 30 s",
    "security.jwt.refresh": "it is always 5 minutes",
    "telemetry.decisions.maxBytes": "it is always 64 MiB",
    "telemetry.tracing.timeout": "it is always 5 s",
    "approx-prefix-cache-producer.maxSiblings": "it is always 16 requests",
    "approx-prefix-cache-producer.ttl": "it is always 1 hour",
    "predicted-latency-pd-decider.nonCachedTokens": (
        "predictions always decide; prefix-based-pd-decider has a fixed number of tokens"
    ),
    "predicted-latency-producer.maxRelativeError": (
        "predictions are always used; alert on kvlane_latency_prediction_error_ratio instead"
    ),
    "token-producer.local.cacheBytes": "it is always 64 MiB",
    "token-producer.pod.timeout": "it is always 300 ms",
    "tokenizer.local.cacheBytes": "it is always 64 MiB",
    "tokenizer.pod.timeout": "it is always 300 ms",
}
"""Removed settings by path, with what replaced each: `*` stands for a name that the configuration chooses. A path that
starts with the type of a plugin is below the plugin's parameters. Add a key here and to docs/changelog.md when a
setting is removed."""

_POOL = re.compile(r"^pools\.[^.]+\.")
_NAMES = tuple((re.compile(re.escape(key).replace(r"\*", "[^.]+")), why) for key, why in REMOVED.items())


def replacement(path: str) -> str | None:
    """Return what replaced the removed setting at this path; None if nothing did. The path of a plugin's parameter
    starts with the type of the plugin."""
    path = _POOL.sub("", path)
    return next((why for key, why in _NAMES if key.fullmatch(path)), None)


T = TypeVar("T")


LARGEST = 2**63 - 1
"""Largest absolute value of a whole number or a size in bytes: the largest number that Kubernetes and llm-d accept."""

LONGEST = 60
"""Number of characters of a key or a text that an error quotes: it may be a line of another program's file."""

SOME = 4
"""Number of known keys that an error lists if the key resembles none."""


class Invalid(Exception):
    """The faults below one path."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems


class FromEnvironment(str):
    """Text of an expanded environment variable, which may also be a number or a boolean."""

    __slots__ = ()


class Unexpanded(FromEnvironment):
    """Text whose environment variable has a `fault`, which a use of the text as a value raises."""

    def __new__(cls, text: str, fault: str) -> Unexpanded:
        made = super().__new__(cls, text)
        made.fault = fault
        return made

    fault: str


def param(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    more_than: float | None = None,
    key: str | None = None,
    aliases: Sequence[str] = (),
) -> Any:
    """Declare a field with documentation and bounds. `key` is its YAML name (default: the field in camelCase),
    `aliases` are older names; without a default the key is required."""
    metadata = {
        "doc": doc,
        "key": key,
        "aliases": tuple(aliases),
        "bounds": (at_least, at_most, more_than),
    }
    if isinstance(default, list | dict | set):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def yaml_key(field: dataclasses.Field[Any]) -> str:
    return field.metadata.get("key") or camel(field.name)


def in_order(fields: Iterable[dataclasses.Field[Any]]) -> list[dataclasses.Field[Any]]:
    """Return the fields for a reader: required ones first."""
    return sorted(fields, key=lambda field: not (field.default is field.default_factory is dataclasses.MISSING))


def hints(cls: Any) -> dict[str, Any]:
    """Return the resolved annotations of a class. A key of a datum is written as the name of its producer."""
    return _hints(cls)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return {name: str if get_origin(kind) is DataKey else kind for name, kind in get_type_hints(cls).items()}


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key


def suggestion(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1) or _longer(word, known)
    return f"; did you mean '{near[0]}'?" if near else ""


def _longer(word: str, known: Sequence[str]) -> list[str]:
    """Return the only known word that ends with this one: schedulingProfiles for profiles."""
    longer = [one for one in known if one.lower().endswith(word.lower())]
    return longer if len(longer) == 1 and len(word) > 3 else []


def load(cls: type[T], data: Any, path: str = "") -> T:
    """Return an instance of the class. Raise ConfigError with all faults."""
    try:
        return build(cls, data, path)
    except Invalid as invalid:
        raise ConfigError(invalid.problems) from None


def build(cls: type[T], data: Any, path: str, injected: Mapping[str, Any] = types.MappingProxyType({})) -> T:
    """As `load`, but raise Invalid; `injected` are values of fields that YAML does not set."""
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise Invalid(Problem(path, f"must be a mapping, not {_named(cls, data)}{_as_mapping(cls, data)}"))
    values, problems = read(cls, data, path, injected)
    if problems:
        raise Invalid(*problems)
    try:
        return cls(**values)
    except ConfigError as error:
        problems = [dataclasses.replace(one, path=join(path, one.path) if one.path else path) for one in error.problems]
        raise Invalid(*problems) from None
    except ValueError as error:
        raise Invalid(at_its_key(cls, path, str(error))) from None


def at_its_key(cls: type[Any], path: str, message: str) -> Problem:
    """Return the fault that a class found in its values, at the key with which the message starts: `url: has spaces`,
    `profiles.decode: …`. Without a key it is a fault of the whole."""
    key, colon, rest = message.partition(": ")
    names = {yaml_key(field) for field in dataclasses.fields(cls)}
    first = re.split(r"[.\[]", key, maxsplit=1)[0]
    return Problem(join(path, key), rest) if colon and first in names else Problem(path, message)


def read(
    cls: type[Any],
    data: Mapping[Any, Any],
    path: str,
    injected: Mapping[str, Any] = types.MappingProxyType({}),
    wrong: Mapping[str, str] = types.MappingProxyType({}),
    spell: Callable[[str], str] = camel,
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the good values by field, and the faults of single values. `wrong` has messages for fields whose value is
    missing, of another type or out of bounds; `spell` returns the key of a field."""
    fields = [field for field in dataclasses.fields(cls) if field.init and field.name not in injected]
    keys = [(field.metadata.get("key") or spell(field.name), *field.metadata.get("aliases", ())) for field in fields]
    known = [key for of_field in keys for key in of_field]
    values, problems = dict(injected), [_unknown(path, str(key), known) for key in data if str(key) not in known]
    for field, names in zip(fields, keys, strict=True):
        key, message = next((name for name in names if name in data), None), wrong.get(field.name)
        if key is None:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                problems.append(Problem(join(path, names[0]), message or "is required"))
            continue
        here = join(path, key)
        try:
            value = coerce(hints(cls)[field.name], data[key], here)
            _check_bounds(field, value, here)
            key_read: DataKey[Any] | None = field.metadata.get("reads")
            values[field.name] = value if key_read is None else key_read.of(value)
        except Invalid as invalid:
            problems += [Problem(here, message) if message and one.path == here else one for one in invalid.problems]
    return values, problems


def without_nulls(kind: Any, value: Any) -> Any:
    """Return the value without keys that are null although their type has no null, and without empty choices, as
    Kubernetes and llm-d read objects."""
    kinds = get_args(kind) or (kind,)
    if isinstance(value, list):
        return [without_nulls(kinds[0], item) for item in value]
    cls = next((one for one in kinds if isinstance(one, type) and dataclasses.is_dataclass(one)), None)
    if cls is None or not isinstance(value, Mapping):
        return value
    by_key = {yaml_key(field): hints(cls)[field.name] for field in dataclasses.fields(cls)}
    return {
        key: without_nulls(by_key.get(key), item)
        for key, item in value.items()
        if key not in by_key or not _is_unset(by_key[key], item)
    }


def _is_unset(kind: Any, value: Any) -> bool:
    if value is None:
        return type(None) not in get_args(kind) and kind is not Any
    return value == "" and get_origin(kind) is Literal


def plain(value: Any) -> Any:
    """Return a loaded value as YAML and JSON represent it: the inverse of `coerce`."""
    if dataclasses.is_dataclass(value):
        return {yaml_key(field): plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, DataKey):
        return value.producer
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [plain(item) for item in value]
    return value


def coerce(kind: Any, value: Any, path: str) -> Any:
    """Return the value as an instance of the annotated type. Raise Invalid."""
    if isinstance(value, Unexpanded):
        raise Invalid(Problem(path, value.fault))
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _coerce_union(get_args(kind), value, path)
    if origin is Literal:
        return _choose({str(choice).lower(): choice for choice in get_args(kind)}, value, path)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _coerce_mapping(get_args(kind), value, path)
    if isinstance(origin, type) and issubclass(origin, tuple | Sequence | frozenset):
        return _coerce_items(origin, get_args(kind)[0], value, path)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return build(kind, value, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choose({str(member.value).lower(): member for member in kind}, value, path)
    if kind is Any:
        return value
    try:
        return _SCALARS[kind](value)
    except ValueError as error:
        raise Invalid(Problem(path, str(error))) from None


def _coerce_union(kinds: tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    problems: list[Problem] = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return coerce(kind, value, path)
        except Invalid as invalid:
            problems = problems or list(invalid.problems)
    raise Invalid(*problems)


def _coerce_mapping(kinds: tuple[Any, ...], value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Invalid(Problem(path, f"must be a mapping, not {_spell(value)}"))
    return _collect(((str(key), join(path, str(key)), item) for key, item in value.items()), kinds[1], dict)  # type: ignore[no-any-return]


def _coerce_items(origin: type, kind: Any, value: Any, path: str) -> Any:
    if isinstance(value, str) or not isinstance(value, Sequence):
        advice = "" if value is None else f"; write [{value}]"
        if isinstance(value, Mapping):
            advice = "; begin each item with '- '"
        raise Invalid(Problem(path, f"must be a list, not {_spell(value)}{advice}"))
    container = frozenset if issubclass(origin, frozenset) else tuple
    pairs = ((index, f"{path}[{index}]", item) for index, item in enumerate(value))
    return _collect(pairs, kind, lambda built: container(item for _, item in built))


def _collect(entries: Any, kind: Any, finish: Callable[[list[tuple[Any, Any]]], Any]) -> Any:
    built: list[tuple[Any, Any]] = []
    problems: list[Problem] = []
    for key, path, item in entries:
        try:
            built.append((key, coerce(kind, item, path)))
        except Invalid as invalid:
            problems.extend(invalid.problems)
    if problems:
        raise Invalid(*problems)
    return finish(built)


def _choose(choices: dict[str, Any], value: Any, path: str) -> Any:
    chosen = choices.get(str(value).lower())
    if chosen is None:
        names = [str(plain(choice)) for choice in choices.values()]
        near = suggestion(str(value), names)
        raise Invalid(Problem(path, f"must be one of {', '.join(names)}, not {value!r}{near}"))
    return chosen


def _unknown(path: str, key: str, known: Sequence[str]) -> Problem:
    if (instead := replacement(join(path, key))) is not None:
        return Problem(join(path, key), f"was removed: {instead}")
    return Problem(path, unknown(key, known))


def unknown(key: str, known: Sequence[str]) -> str:
    """Return the error for a key that is not known, with the nearest known key, or all keys if none is near."""
    all_keys = f"; known are {', '.join(known)}" if known else "; it has no fields"
    return f"unknown field '{shortened(key)}'{suggestion(key, known) or all_keys}"


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


_UNKNOWN = re.compile(r"unknown field '([^']*)'")


def unknown_key(problem: Problem) -> str:
    """Return the key with which `unknown` began the message; "" for other problems."""
    match = _UNKNOWN.match(problem.message)
    return match[1] if match else ""


def _as_mapping(cls: type[Any], data: Any) -> str:
    """Return how the class is written in YAML."""
    fields = in_order(field for field in dataclasses.fields(cls) if field.init)
    first = yaml_key(fields[0]) if fields else ""
    if isinstance(data, str) and data.startswith(f"{first}:"):
        return f"; a space is missing after '{first}:'"
    if isinstance(data, str) and "://" in data and hints(cls).get(first) is str:
        return f"; write {{{first}: {data}}}"
    keys = [yaml_key(field) for field in fields[:SOME]]
    return f"; its keys are {', '.join(keys)}{', …' if len(fields) > SOME else ''}"


def _named(cls: type[Any], data: Any) -> str:
    """Return the name to print for a value in an error. Values of secret classes are never printed."""
    hidden = not cls.__dataclass_params__.repr and isinstance(data, str)
    return "a text" if hidden else _spell(data)


def _check_bounds(field: dataclasses.Field[Any], value: Any, path: str) -> None:
    bounds = zip(("at least", "at most", "more than"), (ge, le, gt), field.metadata.get("bounds", ()), strict=False)
    for words, holds, bound in bounds if isinstance(value, int | float) else ():
        if bound is not None and not holds(value, bound):
            figure = str(value) if isinstance(value, int) else f"{value:g}"
            raise Invalid(Problem(path, f"must be {words} {bound:g}, not {figure}"))
    if isinstance(value, int) and abs(value) > LARGEST:
        raise Invalid(Problem(path, f"must be at most {LARGEST}" if value > 0 else f"must be at least {-LARGEST}"))


def _bool(value: Any) -> bool:
    if isinstance(value, FromEnvironment):
        value = {"true": True, "false": False}.get(value.lower(), value)
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_spell(value)}{_unquoted(value)}")
    return value


def _int(value: Any) -> int:
    value = _number(value)
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise ValueError(f"must be a whole number, not {_spell(value)}{_unquoted(value)}")
    return int(value)


def _float(value: Any) -> float:
    value = _number(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"must be a finite number, not {_spell(value)}{_unquoted(value)}")
    return float(value)


def _number(value: Any) -> Any:
    if not isinstance(value, FromEnvironment):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _str(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"must be text, not {_spell(value)}")
    return str(value)


def _duration(value: Any) -> Duration:
    value = _number(value)
    if isinstance(value, str):
        return parse_duration(value)
    seconds = _float(value)
    if seconds < 0:
        raise ValueError("a duration is not negative")
    return Duration(seconds)


def _size(value: Any) -> Size:
    size = parse_size(value) if isinstance(value, str) else Size(_int(value))
    if size < 0:
        raise ValueError("a size is not negative")
    return size


def _moment(value: Any) -> Moment:
    """Return a date that YAML has already parsed."""
    if not isinstance(value, str | date):
        raise ValueError(f"must be a date or time, not {_spell(value)}")
    return moment(value)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    Duration: _duration,
    Size: _size,
    Moment: _moment,
}


def _unquoted(value: Any) -> str:
    """Return advice for a number or a boolean that YAML reads as text."""
    if not isinstance(value, str):
        return ""
    if number := _NUMBER.fullmatch(value):
        return f"; write {number[1]} without quotes"
    return f"; write {value} without quotes" if value in ("true", "false") else _variable(value)


_NUMBER = re.compile(r"0*(\d+(?:\.\d+)?)")


def _variable(text: str) -> str:
    """Return advice for an environment variable without braces."""
    name = text.removeprefix("$")
    return f"; write ${{{name}}}" if name != text and name.isidentifier() else ""


def _spell(value: Any) -> str:
    names = {
        type(None): "nothing",
        dict: "a mapping",
        list: "a list",
        str: f"the text {shortened(str(value))!r}",
        bool: str(value).lower(),
    }
    kind = str if isinstance(value, str) else type(value)
    return names.get(kind, repr(value))
