"""A model's tokenizer and chat template, as its folder has them: from a request body to token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from jinja2 import TemplateError
from tokenizers import Tokenizer

from proxy.core.tokens import LocalModel
from proxy.tokens.chat import Uncertain, arguments, refuse_what_steers
from proxy.tokens.pieces import Cutter, PieceCache, packed
from proxy.tokens.template import ChatTemplate

SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt before it is tokenised: its texts, or its token ids where the client gave those."""

    texts: tuple[str, ...] = ()
    ids: tuple[bytes, ...] = ()
    with_specials: bool = False


class Model:
    """Raises ValueError, when made, for a folder that has no tokenizer, or a template that is none."""

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
        """Raises Uncertain for what the engine may see otherwise, or refuse."""
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

    def known(self, rendered: Rendered) -> tuple[list[list[str]], list[list[bytes | None]], int]:
        """The pieces of each text, the token ids of those that came before, and how long the others are in all."""
        pieces = [list(self._cutter.pieces(text)) for text in rendered.texts]
        found = [self._cache.find(several) for several in pieces]
        new = sum(
            len(piece)
            for several, ids in zip(pieces, found, strict=True)
            for piece, known in zip(several, ids, strict=True)
            if known is None
        )
        return pieces, found, new

    def parts(
        self, rendered: Rendered, pieces: Sequence[Sequence[str]], found: Sequence[list[bytes | None]]
    ) -> tuple[bytes, ...]:
        """Packed token ids of each prompt. Takes long for what is new, half a second per megabyte; meanwhile the
        interpreter is free for other threads."""
        if not rendered.texts:
            return rendered.ids
        for several, ids in zip(pieces, found, strict=True):
            new = [at for at, known in enumerate(ids) if known is None]
            for at, made in zip(new, self._encode([several[at] for at in new]), strict=True):
                ids[at] = packed(made)
                self._cache.add(several[at], packed(made))
        before, after = (self._before, self._after) if rendered.with_specials else (b"", b"")
        return tuple([b"".join([before, *filter(None, ids), after]) for ids in found])

    def parts_of(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        """All of it at once; None for Uncertain."""
        try:
            rendered = self.render(path, body)
        except Uncertain:
            return None
        pieces, found, _ = self.known(rendered)
        return self.parts(rendered, pieces, found)

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
        """What the tokenizer puts before and after a text that it is to give special tokens."""
        bare: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        full: list[int] = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return packed(full[:start]), packed(full[start + len(bare) :])
        raise ValueError("the tokenizer changes a text when it adds special tokens")


def find(model: str, environ: Any) -> Path:
    """The folder of a model: as named, or the newest snapshot in the local cache of Hugging Face. Raises ValueError."""
    folder = Path(model).expanduser()
    if folder.is_file():
        return folder.parent
    if folder.is_dir():
        return folder
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    repository = hub / ("models--" + model.replace("/", "--"))
    revision = repository / "refs" / "main"
    if revision.is_file() and (snapshot := repository / "snapshots" / revision.read_text().strip()).is_dir():
        return snapshot
    raise ValueError(f"model: {model!r} is no folder, and {hub} has no such model; nothing is downloaded")


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
    """By name; a single one is the default. A file of its own wins over the configuration."""
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
