"""When a file counts as changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.cli.serve import ConfigurationFiles
from tests.helpers.waiting import PATIENCE, until

TICK = 0.02


@asynccontextmanager
async def watched(file: Path) -> AsyncIterator[list[str]]:
    """What was in it at each change."""
    seen: list[str] = []

    async def changed() -> None:
        seen.append(await asyncio.to_thread(file.read_text))

    task = asyncio.create_task(ConfigurationFiles(file).watch(changed, TICK))
    await asyncio.sleep(2 * TICK)
    yield seen
    task.cancel()


async def test_a_change_is_reported_once(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("one")
    async with watched(file) as seen:
        file.write_text("two")
        await until(lambda: seen == ["two"])
        await asyncio.sleep(5 * TICK)
        assert seen == ["two"]


async def test_rewriting_the_same_text_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("one")
    async with watched(file) as seen:
        file.write_text("one")
        await asyncio.sleep(5 * TICK)
        assert seen == []


async def test_a_temporarily_missing_file_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("one")
    async with watched(file) as seen:
        file.unlink()
        await asyncio.sleep(5 * TICK)
        file.write_text("one")
        await asyncio.sleep(5 * TICK)
        assert seen == []
        file.write_text("two")
        await until(lambda: seen == ["two"])


async def test_a_deleted_file_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("one")
    async with watched(file):
        file.unlink()
        await until(lambda: bool(caplog.messages))
        await asyncio.sleep(5 * TICK)
    missing = f"{file}: cannot be read: No such file or directory"
    assert caplog.messages == [f"--watch: {missing}; keeping the configuration in effect"]


async def test_an_unfinished_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("")
    async with watched(file) as seen:
        for line in range(40):
            with file.open("a") as stream:
                stream.write(f"line {line}\n")
            await asyncio.sleep(TICK / 2)
        await until(lambda: bool(seen))
        assert seen[-1].endswith("line 39\n")
        assert len(seen) < 20


@pytest.mark.parametrize("text", ["scheduling: {file: picker.yaml}", "pools: {a: {scheduling: {file: picker.yaml}}}"])
async def test_the_file_of_a_scheduling_section_counts_too(tmp_path: Path, text: str) -> None:
    file, other = tmp_path / "kvlane.yaml", tmp_path / "picker.yaml"
    file.write_text(text)
    other.write_text("plugins: []")
    async with watched(file) as seen:
        other.write_text("plugins: [{type: queue-scorer}]")
        await until(lambda: len(seen) == 1)


async def test_a_change_between_loading_and_watching_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("one")
    files, notified = ConfigurationFiles(file), asyncio.Event()
    file.write_text("three")

    async def changed() -> None:
        notified.set()

    task = asyncio.create_task(files.watch(changed, TICK))
    await asyncio.wait_for(notified.wait(), PATIENCE)
    task.cancel()
