"""From a body to token ids: exactly the tokens of the whole text, without blocking the event loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from proxy.core.ports import LocalModel, PromptTokenizer
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import State
from proxy.prefix.tokens import TokenSource
from tests.helpers.prefix import model as small
from tests.helpers.prefix.model import TEMPLATE, trained
from tests.helpers.prefix.opening import opening

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path)


@asynccontextmanager
async def opened(model: Path | str, **settings: Any) -> AsyncIterator[PromptTokenizer]:
    async with opening() as source:
        yield source.local(LocalModel(str(model), **settings))


def request(path: str, salt: str = "", **fields: Any) -> InferenceRequest:
    body = json.dumps({"model": "m", **fields}).encode()
    return InferenceRequest("id", path, "m", Prompt((b"estimate",), salt), body=body)


def ids(text: str) -> bytes:
    return array("I", trained().encode(text, add_special_tokens=False).ids).tobytes()


async def test_a_chat_has_the_tokens_of_its_rendered_text(folder: Path) -> None:
    async with opened(folder) as tokens:
        prompt = await tokens.of(request(CHAT, "salt", messages=HELLO), ())
    assert prompt == Prompt((ids("<|start|>user\nHello there<|end|>\n<|start|>assistant\n"),), "salt")


async def test_completions_are_texts_or_token_ids_single_or_several(folder: Path) -> None:
    async with opened(folder) as tokens:
        body = {
            "Hello": (ids("Hello"),),
            ("Hello", "you"): (ids("Hello"), ids("you")),
            (1, 2): (array("I", [1, 2]).tobytes(),),
            ((1,), (2, 3)): (array("I", [1]).tobytes(), array("I", [2, 3]).tobytes()),
        }
        for prompt, parts in body.items():
            made = await tokens.of(request(COMPLETIONS, prompt=prompt), ())
            assert made is not None
            assert made.parts == parts
        generated = await tokens.of(request("/inference/v1/generate", token_ids=[7, 8]), ())
        assert generated is not None
        assert generated.tokens == 2


async def test_special_tokens_surround_a_completion_if_the_tokenizer_adds_them(folder: Path) -> None:
    data = json.loads(trained().to_str())
    start = {"SpecialToken": {"id": "<|start|>", "type_id": 0}}
    a = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, a],
        "pair": [start, a, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [0], "tokens": ["<|start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(data))
    async with opened(folder) as tokens:
        first = await tokens.of(request(COMPLETIONS, prompt="Hello"), ())
        bare = await tokens.of(request(COMPLETIONS, prompt="Hello", add_special_tokens=False), ())
        chat = await tokens.of(request(CHAT, messages=HELLO), ())
    assert first is not None
    assert bare is not None
    assert chat is not None
    assert first.parts == (bytes(4) + ids("Hello"),)
    assert bare.parts == (ids("Hello"),)
    assert chat.parts[0].startswith(ids("<|start|>user"))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": HELLO, "chat_template": "x"}),
        (COMPLETIONS, {"prompt": [[1, -1]]}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "features": [{}]}),
        ("/v1/messages", {"messages": HELLO}),
        ("/v1/responses", {"input": "x"}),
    ],
    ids=str,
)
async def test_an_ambiguous_prompt_has_no_tokens(folder: Path, path: str, fields: Any) -> None:
    async with opened(folder) as tokens:
        assert await tokens.of(request(path, **fields), ()) is None


async def test_a_broken_body_has_no_tokens(folder: Path) -> None:
    async with opened(folder) as tokens:
        for body in (b"", b"{", b"[1]"):
            assert await tokens.of(InferenceRequest("id", CHAT, "m", body=body), ()) is None


@pytest.mark.parametrize("size", [300, 30_000, 80_000])
async def test_prompts_of_every_size_have_the_tokens_of_the_whole_text(folder: Path, size: int) -> None:
    """At once, in a thread, and in a process of its own."""
    text = ("A line of text with 12 numbers, and été.\n" * (size // 30))[:size]
    async with opened(folder) as tokens:
        for _ in range(2):
            prompt = await tokens.of(request(CHAT, messages=[{"role": "user", "content": text}]), ())
            assert prompt is not None
            assert prompt.parts == (ids(f"<|start|>user\n{text}<|end|>\n<|start|>assistant\n"),)


async def test_the_event_loop_runs_while_a_long_prompt_is_tokenised(folder: Path) -> None:
    """Work in a thread that kept the interpreter would let this count to one."""
    text = "".join(f"Line {number} is like no other line.\n" for number in range(1600))
    async with opened(folder) as tokens:
        made = asyncio.ensure_future(tokens.of(request(CHAT, messages=[{"role": "user", "content": text}]), ()))
        turns = 0
        while not made.done():
            await asyncio.sleep(0)
            turns += 1
        assert await made is not None
    assert turns > 20


async def test_a_crashed_process_is_replaced(folder: Path) -> None:
    body = request(CHAT, messages=[{"role": "user", "content": "Some words. " * 6_000}])
    async with opened(folder) as tokens:
        assert await tokens.of(body, ()) is not None
        (child,) = children()
        os.kill(child, signal.SIGKILL)
        assert await tokens.of(body, ()) is None
        assert await tokens.of(body, ()) is not None
    assert not list(children())


async def test_large_bodies_are_skipped_if_their_wait_would_be_too_long(folder: Path) -> None:
    body = request(CHAT, messages=[{"role": "user", "content": "Some words. " * 6_000}])
    async with opened(folder) as tokens:
        made = await asyncio.gather(*[tokens.of(body, ()) for _ in range(6)])
    assert [prompt is None for prompt in made] == [False] * 4 + [True] * 2


async def test_a_large_prompt_without_a_waiting_request_is_still_cached(folder: Path) -> None:
    body = request(CHAT, messages=[{"role": "user", "content": "Some words. " * 6_000}])
    async with opened(folder) as tokens:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await tokens.of(body, ())
        assert await tokens.of(body, ()) is not None


async def test_a_template_in_a_file_takes_precedence_and_tools_may_have_their_own(tmp_path: Path) -> None:
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}]
    folder = small.write(tmp_path, named)
    async with opened(folder) as tokens:
        with_tools = await tokens.of(request(CHAT, messages=HELLO, tools=[]), ())
        assert with_tools is not None
        assert with_tools.parts == (ids("tools"),)
    (folder / "chat_template.jinja").write_text("from the folder")
    (folder / "mine.jinja").write_text("mine")
    for chosen, expected in (("", "from the folder"), (str(folder / "mine.jinja"), "mine")):
        async with opened(folder, chat_template=chosen) as tokens:
            prompt = await tokens.of(request(CHAT, messages=HELLO), ())
            assert prompt is not None
            assert prompt.parts == (ids(expected),)


async def test_a_model_without_a_template_has_completions_only(tmp_path: Path) -> None:
    async with opened(small.write(tmp_path, None)) as tokens:
        assert await tokens.of(request(CHAT, messages=HELLO), ()) is None
        assert await tokens.of(request(COMPLETIONS, prompt="Hello"), ()) is not None


async def test_a_model_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    small.write(snapshot)
    async with opened("org/name") as tokens:
        assert await tokens.of(request(COMPLETIONS, prompt="Hello"), ()) is not None
    with pytest.raises(ValueError, match="nothing is downloaded"):
        TokenSource(lambda: 0.0, State().draft()).local(LocalModel("org/other"))


def test_an_unreadable_model_is_refused(tmp_path: Path) -> None:
    source = TokenSource(lambda: 0.0, State().draft())
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        source.local(LocalModel(str(tmp_path)))
    small.write(tmp_path, "{% if %}")
    with pytest.raises(ValueError, match="chat template"):
        source.local(LocalModel(str(tmp_path)))
    with pytest.raises(ValueError, match="does not exist"):
        source.local(LocalModel(str(tmp_path), chat_template="nowhere"))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "default"}]}')
    with pytest.raises(ValueError, match="has no name or no template"):
        source.local(LocalModel(str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer"):
        source.local(LocalModel(str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="broken"):
        source.local(LocalModel(str(tmp_path)))


def children() -> Iterator[int]:
    """Processes of this one that tokenise."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid() and b"proxy.prefix.tokenizer" in command:
            yield int(path.parent.name)


async def test_a_removed_plugins_tokenizer_is_closed_and_others_continue(folder: Path) -> None:
    state = State()
    opened: dict[str, PromptTokenizer] = {}
    for names in (("kept", "dropped"), ("kept",)):
        draft = state.draft()
        source = TokenSource(lambda: 0.0, draft)
        for name in names:
            opened[name] = draft.get(name, lambda source=source: source.local(LocalModel(str(folder))))  # type: ignore[misc]
        draft.commit()
        await state.finish_commit()
    long = request(COMPLETIONS, prompt="Hello there. " * 1000)
    assert await opened["kept"].of(long, ()) is not None
    with pytest.raises(RuntimeError):
        await opened["dropped"].of(long, ())
    await state.close()
