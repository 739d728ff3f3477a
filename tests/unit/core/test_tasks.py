"""Endless tasks are restarted when they fail, and the program has no other way to start one."""

from __future__ import annotations

import ast
import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.core import tasks
from proxy.core.tasks import Tasks, run_together
from tests.helpers.waiting import until

PACKAGE = Path(tasks.__file__).parents[1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tasks, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(tasks, "LONGEST_PAUSE", 0.004)
    yield
    tasks.failures.clear()


class Loop:
    """An endless task that fails with each of `errors` in turn before it goes on."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.runs = 0
        self.goes_on = False

    async def run(self) -> None:
        self.runs += 1
        if self._errors:
            raise self._errors.pop(0)
        self.goes_on = True
        await asyncio.Event().wait()


async def test_a_kept_task_that_fails_is_restarted_and_counted(quick: None) -> None:
    loop = Loop(KeyError("x"), ValueError("y"))
    async with Tasks() as held:
        held.keep(loop.run, "a-loop", "pod-0")
        assert tasks.failures["a-loop"] == 0
        assert "a-loop" in tasks.failures  # shown as 0 from the start, or an alert would miss the first failure
        await until(lambda: loop.goes_on)
    assert loop.runs == 3
    assert tasks.failures["a-loop"] == 2


async def test_the_traceback_is_logged_once_and_again_when_the_error_changes(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(*[KeyError("x") for _ in range(5)], *[ValueError("y") for _ in range(5)])
    async with Tasks() as held:
        held.keep(loop.run, "a-loop", "pod-0")
        await until(lambda: loop.goes_on)
    records = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info[0] for record in records if record.exc_info] == [KeyError, ValueError]
    assert records[0].getMessage().startswith("task a-loop of pod-0 failed; restarting it in ")


async def test_the_traceback_of_the_same_error_is_logged_again_after_a_minute(
    quick: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SAME_ERROR_LOGGED_EVERY", 0.0)
    loop = Loop(KeyError("x"), KeyError("x"))
    async with Tasks() as held:
        held.keep(loop.run, "a-loop")
        await until(lambda: loop.goes_on)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 2


async def test_a_kept_task_that_returns_or_is_cancelled_has_ended() -> None:
    loop = Loop()

    async def returns() -> None:
        loop.runs += 1

    async with Tasks() as held:
        await held.keep(returns, "a-loop")
        kept = held.keep(loop.run, "a-loop")
        await until(lambda: loop.goes_on)
        kept.cancel()
        await asyncio.wait([kept])
        assert not held
    assert loop.runs == 2


async def test_work_that_runs_together_returns_all_results() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0.001 * (3 - value))
        return value

    assert await run_together(later(1), later(2)) == [1, 2]
    assert await run_together() == []


async def test_the_first_error_of_work_that_runs_together_ends_the_rest_and_leaves_timeouts_intact() -> None:
    ended = []

    async def fails() -> None:
        await asyncio.sleep(0.001)
        raise ValueError("no")

    async def goes_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("the rest")

    with pytest.raises(ValueError, match="no"):
        await run_together(goes_on(), fails())
    assert ended == ["the rest"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(60)


def test_no_endless_coroutine_of_the_program_is_started_without_the_keeper() -> None:
    """`Tasks.start(f(), …)` and `create_task(f())` are for work that ends. `run_together` may have endless work: its
    failure is that of the task around it, which is kept."""
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if "sim" not in path.parts}
    endless = {name for tree in trees.values() for name in _endless(tree)}
    assert {"probe_loop_lag", "keep_reaping", "reload_on_signal", "_discover"} <= endless  # the search finds them
    bare = [
        f"{path.relative_to(PACKAGE)}:{call.lineno}: {name}()"
        for path, tree in trees.items()
        for call, name in _started(tree)
        if name in endless
    ]
    assert not bare, "start these with Tasks.keep"


AMBIGUOUS = {"_look", "run", "watch"}
"""Functions that are not endless have these names too."""


def _endless(tree: ast.Module) -> Iterator[str]:
    """The coroutine functions with a `while True:` that nothing but an exception ends."""
    for function in ast.walk(tree):
        if isinstance(function, ast.AsyncFunctionDef):
            for loop in ast.walk(function):
                forever = isinstance(loop, ast.While) and ast.unparse(loop.test) == "True"
                if forever and not any(isinstance(node, ast.Return | ast.Break | ast.Yield) for node in ast.walk(loop)):
                    yield function.name


def _started(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """The calls whose coroutine becomes a task, at once or by way of a variable."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Assign) and isinstance(call.value, ast.Call) and _name(call.value) not in AMBIGUOUS:
            yield call.value, _name(call.value)
        if isinstance(call, ast.Call) and _name(call) in ("start", "create_task", "ensure_future"):
            for inner in (inner for argument in call.args for inner in ast.walk(argument)):
                if isinstance(inner, ast.Call):
                    yield inner, _name(inner)


def _name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))
