"""A model's chat template: rendered as the engine would, and asked what it wants of messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proxy.core.tokens import ContentFormat
from proxy.tokens.chat import Uncertain, without_developers

_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""Tags that mark what the model wrote, for training; they render what is between them."""


class ChatTemplate:
    """Compiled once. `variables` are what it sees besides those of a request: special tokens, defaults."""

    def __init__(
        self, source: str, wall: Callable[[], float], content: ContentFormat, variables: Mapping[str, Any]
    ) -> None:
        """Raises jinja2.TemplateError for what is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(wall()).strftime(form)
        source = _GENERATION.sub(_always, source)
        self._compiled = environment.from_string(source)
        self._variables = dict(variables)
        self._knows_developers = '"developer"' in source or "'developer'" in source
        self.in_parts = wants_parts(environment.parse(source)) if content == "auto" else content == "openai"

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises Uncertain where the template refuses the conversation: so will the engine."""
        if variables["continue_final_message"]:
            raise Uncertain("continue_final_message")
        messages = variables["messages"]
        if not self._knows_developers and any(message["role"] == "developer" for message in messages):
            messages = without_developers(messages)
        try:
            text: str = self._compiled.render({**self._variables, "documents": None, **variables, "messages": messages})
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RuntimeError,
        ) as error:
            raise Uncertain(str(error)) from error
        return text


def wants_parts(tree: nodes.Template) -> bool:
    """Whether the template goes through the parts of a message's content."""
    messages = {"messages", *_assigned(tree, lambda node: _is(node, "messages"))}
    members = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_is(loop.iter, name) for name in messages)
    }

    def content(node: nodes.Node) -> bool:
        return any(_is(node, name, "content") for name in members)

    names = {"content", *_assigned(tree, content), *_passed(tree, content)}
    return any(content(loop.iter) or any(_is(loop.iter, name) for name in names) for loop in tree.find_all(nodes.For))


def _is(node: nodes.Node | None, name: str, attribute: str = "") -> bool:
    """A variable, or an attribute of it, whichever way it is written; filters, tests and slices do not matter."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is(node.node, name, attribute)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is(node.node, name, attribute)
    if not attribute:
        return isinstance(node, nodes.Name) and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == attribute and _is(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == attribute) and _is(node.node, name)
    return False


def _assigned(tree: nodes.Template, means: Callable[[nodes.Node], bool]) -> Iterator[str]:
    """Names of variables that are set to it, or to one that is."""
    found: list[str] = []
    assignments = [one for one in tree.find_all(nodes.Assign) if isinstance(one.target, nodes.Name)]
    for _ in assignments:
        for one in assignments:
            name = cast(nodes.Name, one.target).name
            if name not in found and (means(one.node) or any(_is(one.node, known) for known in found)):
                found.append(name)
    yield from found


def _passed(tree: nodes.Template, means: Callable[[nodes.Node], bool]) -> Iterator[str]:
    """Parameters of macros that are called with it."""
    for macro in tree.find_all(nodes.Macro):
        for call in tree.find_all(nodes.Call):
            if not _is(call.node, macro.name):
                continue
            for parameter, given in zip(macro.args, call.args, strict=False):
                if means(given):
                    yield parameter.name
            yield from (given.key for given in call.kwargs if means(given.value))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own would escape what means something in HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _always(tag: re.Match[str]) -> str:
    before, end, after = tag.groups()
    return f"{{%{before} {'endif' if end else 'if true'} {after}%}}"
