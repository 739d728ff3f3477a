"""Load YAML and JSON of people and other programs. Every fault of a text is a ConfigError with its position."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from proxy.core.errors import ConfigError, Problem, Unreadable
from proxy.core.params import FromEnvironment, Unexpanded, join

LONGEST = 1_000_000
"""Largest number of values in one file."""

LONGEST_INTEGER = 1024
"""Largest number of bits of an integer. Python refuses to print much longer ones, so no error could show them."""

DEEPEST = 100
"""Largest nesting depth. The parser in C crashes the process at some 20,000."""

WITHHELD = "***"
"""Replaces secrets in configurations that are shown. It is refused as a value: everyone would know the key."""

_OPEN = re.compile(r"(?<!\$)(?:\$\$)*\$\{(?![A-Za-z_][A-Za-z0-9_]*(?::-[^}]*)?\})")
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})")

T = TypeVar("T")


def text_of(path: Path) -> str:
    """Return the content of a file. Raise ConfigError; Unreadable for an error of the system."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Unreadable([Problem(str(path), f"cannot be read: {error.strerror or error}")]) from None
    except ValueError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {_undecoded(error) or error}")]) from None


def _undecoded(error: ValueError) -> str:
    """Return the place of the first byte that is not UTF-8; "" for other errors."""
    if not isinstance(error, UnicodeDecodeError):
        return ""
    line = error.object.count(b"\n", 0, error.start) + 1
    return f"is not UTF-8 (byte 0x{error.object[error.start]:02x} in line {line}); save the file as UTF-8"


def read(text: str, source: str, environ: Mapping[str, str]) -> Any:
    """Return the values of a configuration: `${ENV}` and `${ENV:-default}` are expanded, and a duplicate key is a
    fault. Raise ConfigError, for a syntax error with its line and column."""
    found, problems = read_partly(text, source, environ)
    if problems:
        raise ConfigError(problems)
    return found


def read_partly(text: str, source: str, environ: Mapping[str, str]) -> tuple[Any, list[Problem]]:
    """As `read`, but return the faults of environment variables with the values. A value with a fault is Unexpanded."""
    problems: list[Problem] = []
    found = _guarded(
        lambda: _expand(yaml.load(text, Loader=_StrictLoader), "", environ, problems),
        source,
    )
    return found, problems


def read_data(text: str, source: str = "") -> Any:
    """As `read`, unexpanded, with the parser in C: 500 pods disturb the event loop for 8 ms instead of 70."""
    return _guarded(lambda: yaml.load(text, Loader=_DataLoader), source)


def read_documents(text: str, source: str) -> list[Any]:
    """Return the documents of a file of another program, which may have duplicate keys. Raise ConfigError."""
    return _guarded(lambda: list(yaml.load_all(text, Loader=_ForeignLoader)), source)


def read_json(text: str | bytes, source: str) -> Any:
    """Return the value of a JSON text. Raise ConfigError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([Problem(source, f"is no JSON: {error}")]) from None


def _guarded(load: Callable[[], T], source: str) -> T:
    """Return what `load` returns. Raise ConfigError for any of its errors."""
    try:
        return load()
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError([Problem(source, "is nested too deeply, or in itself")]) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError([described(error, source)]) from None
    except Exception as error:  # noqa: BLE001  # loaders raise more than they document
        text = str(error) if isinstance(error, yaml.YAMLError | ValueError) else repr(error)
        raise ConfigError([Problem(source, " ".join(text.split()))]) from None


_ADVICE = (
    ("found character '\\t'", "a tab: YAML is indented with spaces"),
    ("that cannot start any token", "a text that begins so needs quotes"),
    (
        "mapping values are not allowed here",
        "no key can be here: a line above may lack its colon, or a text its quotes",
    ),
    ("could not find expected ':'", "no colon with a space after it"),
    ("expected <block end>", "not indented as what it belongs to"),
    ("could not determine a constructor", "a tag such as !name, or a lone =; a text that begins so needs quotes"),
    ("expected the node content", "a value is missing here, or a bracket before it is not closed"),
    ("found another document", "a second document after ---: a configuration is one"),
    ("<stream end>", "the file ends before this does"),
)
"""The usual cause, by a part of PyYAML's message."""


def described(error: yaml.MarkedYAMLError, source: str = "") -> Problem:
    """Return the error with line and column and its usual cause."""
    problem = str(error.problem or error.context or error)
    text = next((advice for part, advice in _ADVICE if part in problem), problem)
    mark, began = error.problem_mark, error.context_mark
    if began is not None and mark is not None and began.line < mark.line:
        text += f", in what begins at {began.line + 1}:{began.column + 1}"
    where = f"{source}:{mark.line + 1}:{mark.column + 1}".lstrip(":") if mark else source
    return Problem(where, text)


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Bounded:
    """A loader that refuses deep nesting, and anchors that expand to more than LONGEST values: a few lines of nested
    anchors can stand for more values than fit into memory."""

    _depth = 0

    def descend_resolver(self, parent: Any, index: Any) -> None:
        """Called by the composers in Python and in C for each node on the way down."""
        self._depth += 1
        if self._depth > DEEPEST + 1:
            raise RecursionError
        super().descend_resolver(parent, index)  # type: ignore[misc]

    def ascend_resolver(self) -> None:
        self._depth -= 1
        super().ascend_resolver()  # type: ignore[misc]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """PyYAML passes on the errors of its constructors: ValueError for the date 2030-02-30, KeyError for `!!bool x`,
        AttributeError for `!!timestamp x`."""
        try:
            value = super().construct_object(node, deep)  # type: ignore[misc]
            if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
                raise ValueError(f"it has more than {LONGEST_INTEGER} bits")
            return value
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001  # see above
            text = f"{node.value[:100]!r} " if isinstance(node, yaml.ScalarNode) else ""
            why = f"{text}cannot be read as {node.tag.rpartition(':')[2]}: {error}"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark) from None

    def get_single_node(self) -> yaml.Node | None:
        return _checked(super().get_single_node())  # type: ignore[misc]

    def get_node(self) -> yaml.Node | None:
        return _checked(super().get_node())  # type: ignore[misc]


class _Strict(_Bounded):
    """A loader that refuses duplicate keys; YAML would use the last one."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """Refuse characters that YAML can spell but no response, log or file can contain."""
        value: str = super().construct_scalar(node)  # type: ignore[misc]
        if node.tag in _NUMBERS and ":" in value:
            why = f"YAML reads {value} as a number of base 60; write a duration as 90s, and a text in quotes"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
        if "\0" in value:
            why = "the text contains a NUL (\\0); remove it"
            raise yaml.constructor.ConstructorError(None, None, why, node.start_mark)
        if any("\ud800" <= sign <= "\udfff" for sign in value):
            raise yaml.constructor.ConstructorError(None, None, "half a surrogate pair is no text", node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                why = "a key must be text; a value that begins with { needs quotes"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' stands twice", key.start_mark)
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"  # YAML 1.1 reads a key that is called `on` as true
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)  # type: ignore[misc]
        return mapping


class _StrictLoader(_Strict, yaml.SafeLoader):
    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        """Refuse deep nesting early: each token is examined once per level, which takes a second at depth 1,000."""
        if self.flow_level >= DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(token_class)


class _ForeignLoader(_Bounded, yaml.SafeLoader):
    pass


_InC: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _DataLoader(_Strict, _InC):  # type: ignore[misc, valid-type]
    pass


def _checked(node: yaml.Node | None) -> yaml.Node | None:
    """Raise YAMLError if the aliases of the node expand to too many values."""
    if node is not None and _values(node, {}) > LONGEST:
        raise yaml.YAMLError(f"its anchors stand for more than {LONGEST} values")
    return node


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values of a node with its aliases expanded. Raise RecursionError if it contains itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        children = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        known[id(node)] = 1 + sum(_values(child, known) for child in children)
    return known[id(node)]


def _expand(value: Any, path: str, environ: Mapping[str, str], problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        return {key: _expand(item, join(path, str(key)), environ, problems) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, f"{path}[{index}]", environ, problems) for index, item in enumerate(value)]
    if isinstance(value, str) and "$" in value:
        return _expand_text(value, path, environ, problems)
    if value == WITHHELD:
        why = f"{WITHHELD} stands for a secret that was not shown; write the secret itself"
        problems.append(Problem(path, why))
        return Unexpanded(value, why)
    return value


def _expand_text(text: str, path: str, environ: Mapping[str, str], problems: list[Problem]) -> str:
    """Return FromEnvironment for a text with variables or `$$`."""
    faults: list[str] = []

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name: str = match["name"]
        found: str | None = environ.get(name, match["default"])
        if found is None:
            faults.append(f"environment variable {name} is not set; set it or write ${{{name}:-default}}")
        return found or ""

    if _OPEN.search(text):
        faults.append("has a ${ without a name and a } behind it; write $$ for a dollar sign")
    expanded = _VARIABLE.sub(replace, text)
    problems.extend(Problem(path, fault) for fault in faults)
    if faults:
        return Unexpanded(expanded, faults[0])
    return text if expanded == text else FromEnvironment(expanded)
