"""What `telemetry.record` writes of real requests, and what becomes of them when it cannot."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from proxy.app import App
from proxy.lab.record import load
from proxy.lab.sim import SimConfig
from proxy.settings import from_mapping
from proxy.telemetry import recorder
from proxy.telemetry.recorder import Salt, installation
from tests.helpers.scenarios.stack import Stack, stack
from tests.helpers.waiting import PATIENCE, until

SECRET_WORDS = "the patient is called Ada Lovelace " * 30


@asynccontextmanager
async def recording(path: Path, **record: Any) -> AsyncIterator[Stack]:
    telemetry = {"accessLog": False, "record": {"file": str(path), **record}}
    async with stack(2, SimConfig(time_scale=50, lora_adapters=("poems",)), {"telemetry": telemetry}) as s:
        yield s


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def requests(path: Path) -> list[dict[str, Any]]:
    return [line for line in lines(path) if "t" in line]


async def test_a_request_is_one_line_with_everything_for_a_replay(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    async with recording(path) as s:
        headers = {"x-session-id": "ada", "x-slo-ttft-ms": "300"}
        body = {"model": "sim", "messages": [{"role": "user", "content": SECRET_WORDS}], "max_tokens": 7}
        response, _ = await s.post("/v1/chat/completions", {**body, "ignore_eos": True}, headers)
        assert response.status == 200
    (line,) = requests(path)
    assert (line["kind"], line["model"], line["status"], line["outcome"]) == ("chat", "sim", 200, "complete")
    assert (line["output_tokens"], line["max_tokens"], line["cached_tokens"], line["attempts"]) == (7, 7, 0, 1)
    assert line["prompt_tokens"] == pytest.approx(line["estimated_tokens"], rel=0.2)
    assert (line["pod"] in {"pod-0", "pod-1"}, line["slo_ttft"]) == (True, 0.3)
    assert 0.0 < line["ttft"] <= line["duration"]
    assert "stream" not in line


async def test_neither_prompts_nor_sessions_nor_responses_are_in_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    async with recording(path) as s:
        body = {"model": "sim", "messages": [{"role": "user", "content": SECRET_WORDS}]}
        _, reply = await s.post("/v1/chat/completions", body, {"x-session-id": "lovelace-1", "user": "countess"})
    written = path.read_bytes()
    assert requests(path)
    for word in (
        b"Lovelace",
        b"lovelace-1",
        b"patient",
        b"countess",
        reply["choices"][0]["message"]["content"].encode(),
    ):
        assert word not in written


async def test_the_hashes_cannot_be_computed_without_the_secret(tmp_path: Path) -> None:
    """The same request, recorded by two installations."""
    for name in ("one", "other"):
        async with recording(tmp_path / name) as s:
            await s.chat(SECRET_WORDS)
    (one,), (other,) = requests(tmp_path / "one"), requests(tmp_path / "other")
    assert one["estimated_tokens"] == other["estimated_tokens"]
    assert len(one["chain"][0]) == len(other["chain"][0])
    assert one["chain"] != other["chain"]
    assert lines(tmp_path / "one")[0]["salt"] != lines(tmp_path / "other")[0]["salt"]


async def test_prompts_with_a_common_prefix_have_chains_with_one_also_after_a_restart(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record.jsonl"
    for ending in ("What now?", "What then?"):
        async with recording(path) as s:
            await s.chat(SECRET_WORDS + ending)
    (one,), (other,) = (line["chain"] for line in requests(path))
    assert one[:24] == other[:24]
    assert one != other
    assert sum("kvlane_record" in line for line in lines(path)) == 1


async def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    async with recording(tmp_path / "record.jsonl") as s:
        await s.chat()
    for name in ("record.jsonl", "record.jsonl.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


async def test_streams_adapters_refusals_and_pods_differ(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    async with recording(path) as s:
        async with s.http.post(
            s.url + "/v1/completions", json={"model": "poems", "prompt": "Roses", "stream": True, "max_tokens": 5}
        ) as response:
            await response.read()
        await s.post("/v1/chat/completions", {"model": "unknown", "messages": []})
        await s.http.get(s.url + "/v1/models")
    stream, refused = requests(path)
    assert (stream["kind"], stream["stream"], stream["lora"]) == ("completions", True, True)
    assert refused.keys() == {"t", "kind", "status", "outcome", "duration"}
    assert (refused["status"], refused["outcome"]) == (404, "unknown-model")
    pods = [line for line in lines(path) if "blocks" in line]
    assert pods[0] == {"pod": stream["pod"], "block_size": 16, "blocks": 8192}


async def test_a_pod_has_one_line_in_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.01)
    path = tmp_path / "record.jsonl"
    async with recording(path) as s:
        await s.chat("one")
        await until(path.exists)
        path.rename(tmp_path / "older.jsonl")
        await s.chat("two")
        await until(path.exists)
    for file in (path, tmp_path / "older.jsonl"):
        pods = [line["pod"] for line in lines(file) if "blocks" in line]
        assert pods
        assert len(set(pods)) == len(pods)


async def test_a_record_can_be_replayed(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    async with recording(path) as s:
        for turn in range(4):
            await s.chat(SECRET_WORDS * (turn + 1), max_tokens=5)
    record = load([path], Random(0))
    first, *later = record.workload.jobs
    assert len(later) == 3
    assert all(job.ids[: len(first.ids) - 1] == first.ids[:-1] for job in later)
    assert [seen.cached_tokens or 0 for seen in record.seen] == sorted(seen.cached_tokens or 0 for seen in record.seen)


async def test_a_configuration_without_a_prefix_index_is_recorded(tmp_path: Path) -> None:
    telemetry = {"accessLog": False, "record": {"file": str(tmp_path / "r.jsonl")}}
    scheduling = {"plugins": [{"type": "queue-scorer"}]}
    async with stack(1, settings={"telemetry": telemetry, "scheduling": scheduling}) as s:
        await s.chat(SECRET_WORDS)
    (line,) = requests(tmp_path / "r.jsonl")
    assert len(line["chain"][0]) >= 24


async def test_an_unwritable_path_costs_lines_and_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.01)
    path = tmp_path / "missing" / "record.jsonl"
    with caplog.at_level(logging.WARNING):
        async with recording(path) as s:
            for number in range(3):
                response, _ = await s.chat(f"number {number}")
                assert response.status == 200
                await asyncio.sleep(0.05)
            await until_lost(s, 3)
    result = [record.getMessage() for record in caplog.records if "the record" in record.getMessage()]
    assert len([message for message in result if "failed to write" in message]) == 1


async def until_lost(s: Stack, count: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while (await s.sample("kvlane_record_lines_lost_total") or 0.0) < count:
            await asyncio.sleep(0.01)


async def test_a_directory_that_returns_is_written_to_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.01)
    path = tmp_path / "later" / "record.jsonl"
    async with recording(path) as s:
        await s.chat("one")
        await until_lost(s, 1)
        path.parent.mkdir()
        await s.chat("two")
        await until(path.exists)
    assert requests(path)


async def test_a_record_whose_directory_came_late_is_continued_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", 0.01)
    path = tmp_path / "later" / "record.jsonl"
    async with recording(path) as s:
        path.parent.mkdir()
        await s.chat("the same prompt " * 100)
    async with recording(path) as s:
        await s.chat("the same prompt " * 100)
    before, after = requests(path)
    assert (before["chain"], before["t"] < after["t"]) == (after["chain"], True)


async def test_a_record_of_the_wrong_kind_does_not_hurt_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> object:
        raise RuntimeError("out of order")

    monkeypatch.setattr(recorder, "_request_fields", broken)
    async with recording(tmp_path / "record.jsonl") as s:
        response, _ = await s.chat()
        assert response.status == 200
        assert await s.sample("kvlane_record_lines_lost_total") == 1
    assert any("missing in the record" in record.getMessage() for record in caplog.records)


async def test_by_default_there_is_no_recorder() -> None:
    async with stack(1) as s:
        assert s.app._server.service.listeners.request_ended == (s.app.observer.request_ended,)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(Exception, match=re.escape("telemetry.record.file: is empty")):
        App(from_mapping({"telemetry": {"record": {"file": ""}}}))


class TestTheSecret:
    def test_the_secret_is_created_once_and_kept(self, tmp_path: Path) -> None:
        first = installation(tmp_path / "key", 5.0)
        assert installation(tmp_path / "key", 9.0) == first
        assert (first.started, len(first.secret)) == (5.0, recorder.SECRET_BYTES)

    def test_the_secret_is_temporary_if_the_file_is_something_else(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "key").write_text("my diary")
        first, second = (installation(tmp_path / "key", 5.0) for _ in range(2))
        assert first.secret != second.secret
        assert "temporary" in caplog.text
        assert (tmp_path / "key").read_text() == "my diary"

    def test_names_differ_by_their_kind(self) -> None:
        one = Salt(b"secret")
        assert one.name("tenant", "ada") == one.name("tenant", "ada")
        assert len({one.name("tenant", "ada"), one.name("session", "ada"), Salt(b"other").name("tenant", "ada")}) == 3

    def test_a_chain_has_eight_characters_per_hash(self) -> None:
        chain = Salt(b"secret").chain([1, 2, 2**64 - 1])
        assert len(chain) == 24
        assert Salt(b"secret").chain([1, 2])[:16] == chain[:16]


async def test_times_of_all_processes_have_one_origin(tmp_path: Path) -> None:
    """Times of a process that started later are larger."""
    path = tmp_path / "record.jsonl"
    for _ in range(2):
        async with recording(path) as s:
            await s.chat()
    first, second = requests(path)
    assert 0.0 <= first["t"] < second["t"] < 60.0
