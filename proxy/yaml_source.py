"""YAML text to plain values: no key twice, `${ENV}` and `${ENV:-default}` expanded in values."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from proxy.core.errors import ConfigError, Problem
from proxy.core.params import FromEnvironment, join

LONGEST = 1_000_000
"""Values of one file."""

DEEPEST = 100
"""Brackets in brackets."""

WITHHELD = "***"
"""In the place of secrets, wherever a configuration is shown. Taken back as it is, it would be the key of everybody."""

_OPEN = re.compile(r"(?<!\$)(?:\$\$)*\$\{(?![A-Za-z_][A-Za-z0-9_]*(?::-[^}]*)?\})")
_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})")


def read(text: str, source: str, environ: Mapping[str, str]) -> Any:
    """Raises ConfigError, for a syntax error with its line and column."""
    try:
        values = yaml.load(text, Loader=_StrictLoader)
        return _expanded(values, environ)
    except RecursionError:
        raise ConfigError([Problem(source, "is nested too deeply, or in itself")]) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError([described(error, source)]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([Problem(source, str(error))]) from None


_ADVICE = (
    ("found character '\\t'", "a tab: YAML is indented with spaces"),
    ("that cannot start any token", "a text that begins so needs quotes"),
    (
        "mapping values are not allowed here",
        "no key can be here: a line above may lack its colon, or a text its quotes",
    ),
    ("could not find expected ':'", "no colon with a space after it"),
    ("expected <block end>", "not indented as what it belongs to"),
    ("<stream end>", "the file ends before this does"),
)
"""What it mostly means, for what PyYAML says."""


def described(error: yaml.MarkedYAMLError, source: str = "") -> Problem:
    """With line and column, and what it mostly means."""
    said = str(error.problem or error.context or error)
    advice = next((advice for part, advice in _ADVICE if part in said), "")
    mark, began = error.problem_mark, error.context_mark
    if began is not None and mark is not None and began.line < mark.line:
        said += f", in what begins at {began.line + 1}:{began.column + 1}"
    where = f"{source}:{mark.line + 1}:{mark.column + 1}".lstrip(":") if mark else source
    return Problem(where, f"{advice} ({said})" if advice else said)


def _expanded(values: Any, environ: Mapping[str, str]) -> Any:
    problems: list[Problem] = []
    expanded = _expand(values, "", environ, problems)
    if problems:
        raise ConfigError(problems)
    return expanded


class _StrictLoader(yaml.SafeLoader):
    """A key that stands twice in one mapping is an error; YAML would let the last win. So is a text that anchors make
    longer than LONGEST: a few lines of anchors in anchors can stand for more values than there is memory."""

    def fetch_flow_collection_start(self, token_class: type[yaml.Token]) -> None:
        """What is nested a thousand deep takes a second to be read: each token is looked at once for each level."""
        if self.flow_level >= DEEPEST:
            raise RecursionError
        super().fetch_flow_collection_start(token_class)

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _values(node, {}) > LONGEST:
            raise yaml.YAMLError(f"its anchors stand for more than {LONGEST} values")
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """YAML can spell what no text can hold, and no answer, log or file could show."""
        value = super().construct_scalar(node)
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
        return super().construct_mapping(node, deep)


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many there are in a node once its aliases are written out. RecursionError if it holds itself."""
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
        problems.append(Problem(path, f"{WITHHELD} stands for a secret that was not shown; write the secret itself"))
    return value


def _expand_text(text: str, path: str, environ: Mapping[str, str], problems: list[Problem]) -> FromEnvironment:
    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name: str = match["name"]
        default: str | None = match["default"]
        found = environ.get(name, default)
        if found is None:
            problems.append(
                Problem(path, f"environment variable {name} is not set; set it or write ${{{name}:-default}}")
            )
        return found or ""

    if _OPEN.search(text):
        problems.append(Problem(path, "has a ${ without a name and a } behind it; write $$ for a dollar sign"))
    return FromEnvironment(_VARIABLE.sub(replace, text))
