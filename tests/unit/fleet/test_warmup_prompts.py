"""Which prompts are kept for pods that come."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.fleet.settings import WarmupSettings
from proxy.fleet.warmup import LARGEST_BODY, MOST_COUNTED, SharedPrompts

CHAT = "/v1/chat/completions"


def conversation(system: str, question: str = "?", model: str = "m", **fields: Any) -> InferenceRequest:
    messages = [{"role": "system", "content": system * 50}, {"role": "user", "content": question}]
    return InferenceRequest("id", CHAT, model, body=orjson.dumps({"model": model, "messages": messages, **fields}))


def prompts(clock: ManualClock | None = None, **settings: Any) -> SharedPrompts:
    wanted = WarmupSettings(prompts=settings.pop("prompts", 2))
    return SharedPrompts(wanted, clock or ManualClock(), **{"shared_by": 3, "sample": 1, **settings})


def see(seen: SharedPrompts, system: str, times: int = 3, model: str = "m") -> None:
    for number in range(times):
        seen.see(conversation(system, f"question {number}", model))


def systems(seen: SharedPrompts, models: frozenset[str] | None = None) -> list[str]:
    return [orjson.loads(head.body)["messages"][0]["content"][:8] for head in seen.hottest(models)]


def test_a_prompt_is_kept_when_enough_different_requests_share_it() -> None:
    seen = prompts()
    see(seen, "shared! ", 2)
    assert (systems(seen), seen.bytes) == ([], 0)
    see(seen, "shared! ", 3)
    assert systems(seen) == ["shared! "]


def test_repetitions_of_one_request_do_not_count() -> None:
    seen = prompts()
    for _ in range(20):
        seen.see(conversation("private ", "the same"))
    assert systems(seen) == []


def test_text_that_is_not_shared_is_not_kept() -> None:
    seen = prompts()
    see(seen, "private ", 2)
    assert "private" not in repr(seen._heads)
    see(seen, "private ", 3)
    assert "private" in repr(seen._heads)
    assert "question" not in repr(seen._heads)


def test_the_most_used_prompts_of_every_model_are_first() -> None:
    seen = prompts()
    for system, times in (("seldom  ", 3), ("often   ", 6), ("between ", 4)):
        see(seen, system, times)
    see(seen, "adapter ", 3, model="poems")
    assert systems(seen, frozenset({"m"})) == ["often   ", "between "]
    assert systems(seen, frozenset({"poems"})) == ["adapter "]
    assert set(systems(seen)) == {"often   ", "between ", "adapter "}


def test_old_use_has_little_weight() -> None:
    clock = ManualClock()
    seen = prompts(clock, prompts=1)
    see(seen, "past    ", 30)
    clock.advance(3600.0)
    see(seen, "present ", 3)
    assert systems(seen) == ["present "]


def test_requests_are_sampled() -> None:
    seen = prompts(sample=4)
    see(seen, "shared! ", 11)
    assert systems(seen) == []
    see(seen, "shared! ", 12)
    assert systems(seen) == ["shared! "]


def test_texts_stay_within_their_limit_and_the_least_used_are_dropped() -> None:
    seen = prompts(prompts=100, most_bytes=2000)
    see(seen, "hot     ", 9)
    for number in range(20):
        see(seen, f"cold {number:02} ", 3)
        assert seen.bytes <= 2000
    assert "hot     " in systems(seen)
    assert seen.bytes == sum(len(head.body) for head in seen.hottest(None))


def test_counters_are_bounded() -> None:
    seen = prompts()
    see(seen, "shared! ", 3)
    for number in range(MOST_COUNTED + 10):
        seen.see(conversation(f"user {number} "))
    assert len(seen._heads) == MOST_COUNTED
    assert (systems(seen), seen.bytes) == ([], 0)


def test_large_bodies_and_uploads_are_skipped() -> None:
    seen = prompts(shared_by=2)
    for number in range(4):
        seen.see(conversation("shared! ", f"{number}" * LARGEST_BODY))
        seen.see(InferenceRequest("id", CHAT, "m"))
    assert systems(seen) == []
