"""A model's tokenizer and chat template, which turn a request body into token ids."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import orjson
from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ContentFormat, LocalModel, PromptTokenizer, SystemClock
from proxy.core.request import InferenceRequest, Prompt
from proxy.offload import OffloadPool, Reply, serve
from proxy.prefix.chat import Uncertain, arguments, refuse_what_steers, without_developers
from proxy.prefix.hashing import packed
from proxy.telemetry.lines import guard_standard_error

log = logging.getLogger(__name__)


Encode = Callable[[Sequence[str]], list[list[int]]]
"""Texts -> their token ids, each separately and without surrounding special tokens."""

STRETCH = 4096
"""Characters between two cuts at line feeds."""

_LINE = re.compile(r"(?<=\n)(?=[A-Za-z])")

_PROBES = ("one two", "  three\n\nfour  ", "fünf\t6", "x = {}\n", "\nseven", "eight ", "九十")


class Cutter:
    """`added` are all added tokens that are looked for in the raw text, `edges` those before which it may be cut.
    What is promised about cuts is tried out with the tokenizer, and left alone where it fails."""

    def __init__(self, encode: Encode, added: Sequence[str], edges: Sequence[str]) -> None:
        ordered = sorted(added, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._edges = frozenset(edge for edge in edges if _holds(encode, lambda a, b, edge=edge: (a, edge + b)))  # type: ignore[misc]
        self._lines = _holds(encode, lambda a, b: (a + "\n", "Word" + b))

    def pieces(self, text: str) -> Iterator[str]:
        start = 0
        for found in self._tokens.finditer(text) if self._tokens and self._edges else ():
            if found[0] in self._edges and found.start() > start:
                yield from self._stretches(text[start : found.start()])
                start = found.start()
        yield from self._stretches(text[start:])

    def _stretches(self, text: str) -> Iterator[str]:
        start = 0
        while self._lines and len(text) - start > STRETCH:
            cut = _LINE.search(text, start + STRETCH)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


def _holds(encode: Encode, split: Callable[[str, str], tuple[str, str]]) -> bool:
    """Whether texts have the same tokens in two pieces as in one."""
    pairs = [split(before, after) for before in _PROBES for after in _PROBES]
    whole = encode([a + b for a, b in pairs])
    heads, tails = encode([a for a, _ in pairs]), encode([b for _, b in pairs])
    return all(one == head + tail for one, head, tail in zip(whole, heads, tails, strict=True))


class PieceCache:
    """Packed token ids of pieces, up to `max_bytes`; the least recently used are evicted. Several threads use it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def find(self, pieces: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            found = list(map(self._known.get, pieces))
            for piece, ids in zip(pieces, found, strict=True):
                if ids is not None:
                    self._known.move_to_end(piece)
        return found

    def add(self, piece: str, ids: bytes) -> None:
        with self._lock:
            if piece in self._known:
                return
            self._known[piece] = ids
            self.bytes += _size(piece, ids)
            while self.bytes > self._max_bytes and self._known:
                self.bytes -= _size(*self._known.popitem(last=False))


def _size(piece: str, ids: bytes) -> int:
    """Return the memory of a text. A text that is not ASCII may take up to four times as much, which is rare."""
    return len(piece) + len(ids) + 250


_GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
"""Tags that mark the model's output for training; they render their content."""


class ChatTemplate:
    """A compiled chat template. `variables`: special tokens and defaults, beside the fields of a request."""

    def __init__(
        self, source: str, wall: Callable[[], float], content: ContentFormat, variables: Mapping[str, Any]
    ) -> None:
        """Raise jinja2.TemplateError for an invalid template."""
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
        """Raise Uncertain if the template refuses the conversation; the engine will refuse it too."""
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
    """Return whether the template iterates over the parts of a message's content."""
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
    """Return whether the expression is the variable or an attribute of it, in any notation; filters, tests and slices
    are ignored."""
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
    """Return the names of variables that are assigned from it, directly or indirectly."""
    found: list[str] = []
    assignments = [one for one in tree.find_all(nodes.Assign) if isinstance(one.target, nodes.Name)]
    for _ in assignments:
        for one in assignments:
            name = cast(nodes.Name, one.target).name
            if name not in found and (means(one.node) or any(_is(one.node, known) for known in found)):
                found.append(name)
    yield from found


def _passed(tree: nodes.Template, means: Callable[[nodes.Node], bool]) -> Iterator[str]:
    """Return the parameters of macros that receive it."""
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
    """Jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _always(tag: re.Match[str]) -> str:
    before, end, after = tag.groups()
    return f"{{%{before} {'endif' if end else 'if true'} {after}%}}"


SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


Pieces = list[tuple[str, bytes | None]]
"""The pieces of a text with their token ids, None where these are not known."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt before tokenisation: its texts, or its token ids if the client sent those."""

    texts: tuple[str, ...] = ()
    ids: tuple[bytes, ...] = ()
    with_specials: bool = False


class Model:
    """Raise ValueError, when made, for a folder without a tokenizer, or an invalid template."""

    def __init__(self, model: LocalModel, wall: Callable[[], float]) -> None:
        self._settings = model
        folder = find(model.model, os.environ)
        config = _config(folder / "tokenizer_config.json")
        self._tokenizer = _tokenizer(folder / "tokenizer.json")
        self._before, self._after = self._around()
        added = [token for token in self._tokenizer.get_added_tokens_decoder().values() if not token.normalized]
        edges = [token.content for token in added if token.special and not token.lstrip and not token.single_word]
        self._cutter = Cutter(self._encode, [token.content for token in added], edges)
        self._cache = PieceCache(model.cache_bytes)
        special = {name: _text(config[name]) for name in SPECIALS if config.get(name)}
        defaults = {**special, **model.template_kwargs}
        try:
            self._templates = {
                name: ChatTemplate(source, wall, model.content_format, defaults)
                for name, source in _templates(folder, config, model.chat_template).items()
            }
        except TemplateError as error:
            raise ValueError(f"the chat template of {model.model} is none: {error}") from None

    def render(self, path: str, body: bytes) -> Rendered:
        """Raise Uncertain where the engine may see something else or refuse."""
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError:
            raise Uncertain("the body") from None
        if not isinstance(fields, dict):
            raise Uncertain("the body")
        if path == "/v1/chat/completions":
            return self._chat(fields)
        if path == "/v1/completions":
            return _completion(fields)
        if path == "/inference/v1/generate":
            return _given(fields, "token_ids")
        raise Uncertain(path)

    def known(self, rendered: Rendered) -> tuple[list[Pieces], int]:
        """Return the pieces of each text, and the length of all pieces without token ids."""
        texts = []
        for text in rendered.texts:
            pieces = list(self._cutter.pieces(text))
            texts.append(list(zip(pieces, self._cache.find(pieces), strict=True)))
        return texts, sum(len(piece) for pieces in texts for piece, ids in pieces if ids is None)

    def parts(self, rendered: Rendered, texts: Sequence[Pieces]) -> tuple[bytes, ...]:
        """Return packed token ids of each prompt. New text takes half a second per megabyte, during which other threads
        can run."""
        parts = list(rendered.ids)
        before, after = (self._before, self._after) if rendered.with_specials else (b"", b"")
        for pieces in texts:
            new = [piece for piece, ids in pieces if ids is None]
            made = dict(zip(new, map(packed, self._encode(new)), strict=True))
            for piece, ids in made.items():
                self._cache.add(piece, ids)
            parts.append(b"".join([before, *[made[piece] if ids is None else ids for piece, ids in pieces], after]))
        return tuple(parts)

    def parts_of(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        """Render and tokenise at once; return None for Uncertain."""
        try:
            rendered = self.render(path, body)
        except Uncertain:
            return None
        texts, _ = self.known(rendered)
        return self.parts(rendered, texts)

    def _chat(self, fields: dict[str, Any]) -> Rendered:
        name = "tool_use" if fields.get("tools") is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise Uncertain("no chat template")
        exclude = self._settings.exclude_tools_when_not_chosen
        text = template.render(arguments(fields, template.in_parts, exclude))
        return Rendered((text,), with_specials=fields.get("add_special_tokens") is True)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        # The call for many lets go of the interpreter's lock, that for one does not.
        made = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in made]

    def _around(self) -> tuple[bytes, bytes]:
        """Return what the tokenizer adds before and after a text that gets special tokens."""
        bare: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return packed(full[:start]), packed(full[start + len(bare) :])
        raise ValueError("the tokenizer changes a text when it adds special tokens")


def find(model: str, environ: Any) -> Path:
    """Return the folder of a model: the named one, or a snapshot in the local Hugging Face cache. Raise ValueError."""
    folder = Path(model).expanduser()
    if folder.is_file():
        return folder.parent
    if folder.is_dir():
        return folder
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    repository = cache / ("models--" + model.replace("/", "--"))
    revision = repository / "refs" / "main"
    if revision.is_file() and (snapshot := repository / "snapshots" / revision.read_text().strip()).is_dir():
        return snapshot
    raise ValueError(f"model: {model!r} is no folder, and {cache} has no such model; nothing is downloaded")


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ValueError(f"model: {path} does not exist")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001  # the package raises nothing more special
        raise ValueError(f"model: {path} is no tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"model: {path} is broken: {error}") from None
    return config if isinstance(config, dict) else {}


def _templates(folder: Path, config: dict[str, Any], chosen: str) -> dict[str, str]:
    """Return templates by name; a single one is the default. A separate file overrides the configuration."""
    file = Path(chosen).expanduser() if chosen else folder / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text()}
    if chosen:
        raise ValueError(f"chatTemplate: {chosen} does not exist")
    given = config.get("chat_template") or _config(folder / "chat_template.json").get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    try:
        return {str(item["name"]): str(item["template"]) for item in given or ()}
    except (TypeError, KeyError, IndexError):
        raise ValueError(f"model: an entry of chat_template in {folder} has no name or no template") from None


def _completion(fields: dict[str, Any]) -> Rendered:
    refuse_what_steers(fields)
    prompt = fields.get("prompt")
    with_specials = fields.get("add_special_tokens") is not False
    if isinstance(prompt, str):
        return Rendered((prompt,), with_specials=with_specials)
    if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
        return Rendered(tuple(prompt), with_specials=with_specials)
    return _given(fields, "prompt")


def _given(fields: dict[str, Any], name: str) -> Rendered:
    ids = fields.get(name)
    if fields.get("features"):
        raise Uncertain("features")
    if not isinstance(ids, list) or not ids:
        raise Uncertain(name)
    try:
        return Rendered(ids=tuple(packed(one) for one in (ids if isinstance(ids[0], list) else [ids])))
    except (TypeError, OverflowError):
        raise Uncertain(name) from None


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


AT_ONCE = 2048
"""Characters of uncached text that are tokenised on the event loop, in a millisecond. More use a thread, because the
tokenizer releases the interpreter lock."""

LARGE = 64 * 1024
"""Bytes of a body that is parsed and rendered here. JSON and templates hold the interpreter lock, so larger bodies go
to another process."""

MOST_WAITING = 4
"""Number of large bodies in the queue beyond which a body is not tokenised: the producers' deadline would pass."""


class LocalTokens(PromptTokenizer):
    """Raise ValueError for an unreadable model. The process for large bodies starts with the first one and ends with
    `async with`."""

    def __init__(self, model: LocalModel, wall: Callable[[], float]) -> None:
        self._model = Model(model, wall)
        self._threads = ThreadPoolExecutor(1, "tokens")
        self._pool = OffloadPool("proxy.prefix.tokenizer", model)

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        body = request.body
        parts = await (self._parts(request.path, body) if len(body) <= LARGE else self._apart(request.path, body))
        return Prompt(parts, request.prompt.salt) if parts else None

    async def __aenter__(self) -> LocalTokens:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._pool.close()
        self._threads.shutdown(wait=False)

    async def _parts(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        model = self._model
        try:
            rendered = model.render(path, body)
        except Uncertain as reason:
            log.debug("did not tokenise a prompt: %s", reason)
            return None
        texts, new = model.known(rendered)
        if new <= AT_ONCE:
            return model.parts(rendered, texts)
        return await asyncio.get_running_loop().run_in_executor(self._threads, model.parts, rendered, texts)

    async def _apart(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        if self._pool.pending >= MOST_WAITING:
            return None
        reply = await self._pool.ask(path, body)
        return tuple(reply[1]) if reply else None


def main() -> None:
    """Run the process that tokenises large bodies."""
    guard_standard_error()
    serve(_prepared)


def _prepared(settings: LocalModel) -> Reply:
    model = Model(settings, SystemClock().wall)

    return lambda path, body: (None, model.parts_of(path, body) or ())


if __name__ == "__main__":
    main()
