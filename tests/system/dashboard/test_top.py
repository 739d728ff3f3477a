from __future__ import annotations

import asyncio
import os
import pty
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from proxy.core.ports import ManualClock, SystemClock
from proxy.core.tasks import Tasks
from proxy.dashboard.client import FeedClient, FleetPicture, PodView, Refused, between, totals_in
from proxy.dashboard.terminal import HEAD, TITLES, SortOrder, View, keys_in, number, pressed, screen, seconds
from proxy.lab.sim import SimConfig
from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import Stack, stack
from tests.helpers.waiting import PATIENCE, until

ROOT = Path(__file__).parents[3]

FIELDS = [
    "pool",
    "role",
    "state",
    "breaker",
    "doubts",
    "requests",
    "waiting",
    "running",
    "kv",
    "sent",
    "failed",
    "rankOf",
    "new",
]


def row(
    requests: int = 0, sent: int = 0, failed: int = 0, state: str = "ready", role: str = "", of: str | None = None
) -> list[Any]:
    return ["default", role, state, "closed", [], requests, 0, requests, 0.5, sent, failed, of, "of a later version"]


def everything(pods: Mapping[str, Any]) -> dict[str, Any]:
    return {"at": 100.0, "fields": FIELDS, "pods": pods, "about": {"version": "1.0", "panics": []}, "points": []}


def picture_of(pods: Mapping[str, Any]) -> FleetPicture:
    picture = FleetPicture()
    picture.apply("all", everything(pods), 0.0)
    return picture


def test_changes_are_merged_and_removed_pods_disappear() -> None:
    picture = picture_of({"a": row(1), "b": row(2)})
    picture.apply("change", {"at": 101.0, "pods": {"a": row(5), "b": None}}, 1.0)
    assert [(pod.name, pod.requests) for pod in picture.rows()] == [("a", 5)]


def test_rates_are_over_the_last_ten_seconds() -> None:
    picture = picture_of({"a": row(sent=1000)})
    for second in range(1, 31):
        sent = 1000 if second <= 15 else 1000 + 3 * (second - 15)
        picture.apply("change", {"at": 100.0 + second, "pods": {"a": row(sent=sent, failed=0)}}, float(second))
    assert picture.rows()[0].rate == pytest.approx(3.0)


def test_counts_of_several_workers_change_with_points_and_rates_cover_the_time_in_between() -> None:
    picture = FleetPicture()
    about = {"version": "1.0", "panics": [], "workers": 2}
    old = {**everything({"a": row(sent=100)}), "about": about, "points": [{"t": 20.0, "good": 1.0}]}
    picture.apply("all", old, 0.0)
    for second in range(1, 13):
        sent = 100 + 30 * ((second + 2) // 6)
        point = {"point": {"t": 99.0 + second, "good": 5.0}} if (second + 2) % 6 == 0 else {}
        picture.apply("change", {"at": 100.0 + second, "pods": {"a": row(sent=sent)}, **point}, float(second))
        expected = None if second < 4 else 30 / 3 if second < 10 else 60 / 9
        assert picture.rows()[0].rate == (expected if expected is None else pytest.approx(expected))


def test_failed_and_refused_requests_are_shown_apart() -> None:
    picture = FleetPicture()
    point = {"t": 98.0, "good": 7.0, "failed": 1.0, "refused": 120.0}
    picture.apply("all", {**everything({}), "points": [point]}, 0.0)
    assert "7 req/s · 1 failed/s · 120 refused/s" in screen(picture, View(), (80, 24), 0.0).plain


def test_a_restarted_proxy_replaces_the_whole_picture() -> None:
    picture = picture_of({"a": row(sent=1000), "b": row()})
    picture.apply("all", everything({"a": row(sent=2)}), 1.0)
    (pod,) = picture.rows()
    assert (pod.sent, pod.rate) == (2, None)


def test_old_totals_are_not_shown() -> None:
    picture = FleetPicture()
    picture.apply("all", {**everything({}), "points": [{"t": 98.0, "good": 7.0}]}, 0.0)
    assert picture.totals(20.0)["good"] == 7.0
    assert picture.totals(29.0) == {}


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (
            {"tokensFrom": "pods", "out": 120, "in": 0, "hits": 0.4, "hitsFrom": "pods"},
            ["120 tok/s out · 0 in from pods", "hit 40% (- expected) from pods"],
        ),
        (
            {"tokensFrom": "responses", "out": 0, "in": 0, "hits": None, "hitsFrom": "responses"},
            ["- tok/s out · - in from responses", "hit - (- expected) ·"],
        ),
        ({}, ["- tok/s out · - in ·"]),
    ],
)
def test_total_tokens_and_cache_hits_are_shown_with_their_source(point: Any, words: list[str]) -> None:
    picture = FleetPicture()
    picture.apply("all", {**everything({}), "points": [{"t": 99.0, **point}]}, 0.0)
    drawn = "\n".join(f"{line} ·" for line in screen(picture, View(), (160, 10), 1.0).plain.splitlines())
    assert [word for word in words if word not in drawn] == []


EXPOSITION = b"""\
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{model_name="m"} %d
vllm:prefix_cache_queries_total{model_name="m"} %d
vllm:generation_tokens_total{model_name="m"} %d
vllm:time_to_first_token_seconds_bucket{model_name="m",le="0.1"} %d
vllm:time_to_first_token_seconds_bucket{model_name="m",le="1.0"} %d
vllm:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} %d
"""


def test_engine_figures_are_differences_of_two_scrapes() -> None:
    before, now = (
        totals_in(EXPOSITION % (100, 200, 50, 5, 5, 5), 0.0)[0],
        totals_in(EXPOSITION % (175, 300, 250, 10, 15, 15), 2.0)[0],
    )
    figures = between(before, now)
    assert (figures.hit_ratio, figures.tokens) == (0.75, 100.0)
    assert figures.ttft_50 == pytest.approx(0.1)
    assert figures.ttft_90 == pytest.approx(0.82)


def test_an_engine_that_was_restarted_or_is_idle_has_no_figures() -> None:
    (busy,) = totals_in(EXPOSITION % (100, 200, 50, 5, 5, 5), 0.0)
    (fresh,) = totals_in(EXPOSITION % (1, 2, 3, 1, 1, 1), 5.0)
    assert between(busy, fresh).hit_ratio is between(busy, fresh).ttft_90 is between(busy, fresh).tokens is None
    assert between(busy, busy).hit_ratio is None
    assert between(*totals_in(b"", 0.0), *totals_in(b"", 5.0)).tokens is None


def test_the_busiest_pods_are_first_and_equal_ones_sorted_by_name() -> None:
    pods = [PodView("c", requests=1), PodView("b", requests=1), PodView("a", requests=0), PodView("d", requests=9)]
    assert [pod.name for pod in SortOrder().of(pods)] == ["d", "b", "c", "a"]
    assert [pod.name for pod in SortOrder().turned().of(pods)] == ["a", "b", "c", "d"]
    assert [pod.name for pod in SortOrder(TITLES.index("POD")).of(pods)] == ["a", "b", "c", "d"]


def test_pods_sort_by_the_severity_of_their_state() -> None:
    pods = [
        PodView("good", state="ready"),
        PodView("bad", state="ejected"),
        PodView("doubted", state="ready", ejection_reasons=("slow",)),
    ]
    assert [pod.name for pod in SortOrder(TITLES.index("STATE")).of(pods)] == ["bad", "doubted", "good"]


def test_numbers_fit_their_columns() -> None:
    assert [number(one) for one in (None, 0, 0.25, 12.5, 99.7, 999.7, 8123, 123_456)] == [
        *("-", "0", "0.2", "12.5", "100", "1.0k", "8.1k", "123k"),
    ]
    assert [seconds(one) for one in (None, 0.004, 0.9999, 1.25, 99.99)] == ["-", "4ms", "1.0s", "1.2s", "100s"]


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60), (20, 5)])
def test_five_hundred_pods_fit_any_terminal(size: tuple[int, int]) -> None:
    pods = {f"a-rather-long-deployment-name-{n}.svc": row(n, role="decode") for n in range(500)}
    picture = picture_of(pods)
    lines = screen(picture, View(), size, 0.0, "no connection " * 20).plain.split("\n")
    assert len(lines) == size[1]
    if size[0] >= 40:
        assert all(len(line) <= size[0] for line in lines)
        assert "500" in lines[-1]


def test_a_common_end_of_long_names_is_left_out_so_that_they_differ() -> None:
    picture = picture_of({f"vllm-deployment-{n}.llm.svc.cluster.local:8000": row(role="decode") for n in range(20)})
    lines = screen(picture, View(), (80, 24), 0.0).plain.split("\n")[HEAD:]
    assert [line.split()[:2] for line in lines[:2]] == [
        ["vllm-deployment-0", "decode"],
        ["vllm-deployment-1", "decode"],
    ]
    assert len({line.split()[0] for line in lines[:19]}) == 19


def test_scrolling_stops_at_the_last_pod() -> None:
    view = View()
    for key in ("up", "page down", "page down", "down"):
        view = pressed(key, view, total=50, rows=20)
    assert view.top == 30
    assert pressed("end", View(), 50, 20).top == 30
    assert pressed("home", view, 50, 20).top == 0
    assert pressed("down", View(), total=3, rows=20).top == 0


def test_keys_in_a_burst_are_all_processed() -> None:
    assert list(keys_in("s\x1b[Bx\x1b[6~\x1bOAq")) == ["next", "down", "page down", "up", "quit"]


def test_a_pod_has_the_sums_of_its_ranks_and_opens_into_them() -> None:
    ranks = {f"pod-0/{rank}": row(rank, sent=10 * rank, of="pod-0") for rank in range(11)}
    picture = picture_of({**ranks, "pod-1": row(3)})
    picture.pods["pod-0/7"] = replace(picture.pods["pod-0/7"], state="ejected", kv=1.0, waiting=4)
    sums, other = View().rows(picture)
    assert (sums.name, sums.requests, sums.waiting, sums.running, sums.sent) == ("pod-0", 55, 4, 55, 550)
    assert sums.kv == pytest.approx(6 / 11)
    assert sums.condition == "ejected"
    assert (other.name, other.ranks) == ("pod-1", ())
    opened = pressed("open", View(), total=2, rows=20)
    names = [pod.name for pod in opened.rows(picture)]
    assert names == ["pod-0", *(f"pod-0/{rank}" for rank in range(11)), "pod-1"]
    assert pressed("open", opened, total=13, rows=20).rows(picture) == [sums, other]
    lines = screen(picture, opened, (100, 24), 0.0).plain.split("\n")
    assert "2 pods · 1 ejected · 1 ready" in lines[0]
    assert lines[-1].startswith("2 pods by FLY   q quit  s/S sort  r reverse  o ranks")
    assert "o ranks" not in screen(picture_of({"a": row()}), View(), (100, 24), 0.0).plain


def test_ranks_with_a_port_each_are_summed_too_and_rates_add_up() -> None:
    picture = picture_of({f"node-1-rank-{rank}": row(sent=0, of="node-1") for rank in range(2)})
    assert picture.rows()[0].rate is None
    changed = {f"node-1-rank-{rank}": row(sent=10 + rank, failed=rank, of="node-1") for rank in range(2)}
    picture.apply("change", {"at": 102.0, "pods": changed}, 2.0)
    (pod,) = picture.rows()
    assert pod.name == "node-1"
    assert pod.rate == pytest.approx(10.5)
    assert pod.failures == pytest.approx(0.5)


def test_one_exposition_has_the_figures_of_the_pod_and_of_each_rank() -> None:
    lines = b"".join(
        b'vllm:generation_tokens_total{engine="%d",model_name="%s"} %d\n' % (rank, model, 10**rank)
        for rank in (0, 1, 2, 10)
        for model in (b"m", b"n")
    )
    assert [each.counts["tokens"] for each in totals_in(lines, 0.0)] == [2 * (111 + 10**10), 2, 20, 200, 2 * 10**10]


class Proxy:
    """Sends pictures, and can be away."""

    def __init__(self) -> None:
        self.name = "first"
        self.status = 200
        self.runner: web.AppRunner | None = None
        self.port = free_port()

    async def start(self) -> None:
        application = web.Application()
        application.router.add_get("/dashboard/events", self._events)
        self.runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        event = b"event: all\ndata: %s\n\n" % orjson.dumps(everything({self.name: row()}))
        await reply.write(event[:20])
        await reply.write(event[20:])
        with suppress(ConnectionResetError, asyncio.CancelledError):
            await asyncio.sleep(60)
        return reply


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[Proxy, FeedClient, FleetPicture]]:
    one, picture = Proxy(), FleetPicture()
    await one.start()
    async with aiohttp.ClientSession() as session:
        yield one, FeedClient(session, f"http://127.0.0.1:{one.port}/", picture, SystemClock(), lambda: None), picture
    await one.stop()


async def test_a_restarted_proxy_is_found_again_and_its_absence_is_shown() -> None:
    async with proxy() as (one, feed, picture), Tasks() as tasks:
        tasks.start(feed.run(), "events")
        await until(lambda: "first" in picture.pods)
        await one.stop()
        await until(lambda: feed.wrong)
        assert "first" in picture.pods
        one.name = "second"
        await one.start()
        await until(lambda: "second" in picture.pods)
        assert not feed.wrong
        assert "first" not in picture.pods


async def test_a_revoked_key_ends_it_and_a_starting_proxy_does_not() -> None:
    async with proxy() as (one, feed, _), Tasks() as tasks:
        one.status = 503
        following = tasks.start(feed.run(), "events")
        await until(lambda: feed.wrong)
        assert not following.done()
        one.status = 401
        await until(following.done)
        assert feed.refused is not None
        assert feed.refused.status == 401
        with pytest.raises(Refused, match="no"):
            await feed.first()


async def test_scrapes_of_visible_pods_give_their_counters() -> None:
    async with stack(2) as s, aiohttp.ClientSession() as session:
        picture, clock = FleetPicture(), ManualClock()
        feed = FeedClient(session, s.admin, picture, clock, lambda: None)
        await feed.first()
        await feed.read([*picture.rows(), PodView("no-such-pod")])
        for _ in range(4):
            await s.chat("A question. " * 50, max_tokens=5)
        await s.idle()
        clock.advance(4.0)
        await feed.read(picture.rows())
        assert sum(one.tokens or 0.0 for one in picture.figures.values()) == pytest.approx(5.0)
        assert any(one.ttft_50 is not None for one in picture.figures.values())


@pytest.mark.parametrize("behind_one_port", [True, False])
async def test_engines_are_read_once_for_a_pod_and_its_ranks(behind_one_port: bool) -> None:
    config = SimConfig(time_scale=20, data_parallel_size=2 if behind_one_port else 1)
    each = [{"name": f"node-1-rank-{rank}", "labels": {"kvlane/data-parallel-rank": str(rank)}} for rank in range(2)]
    async with (
        stack(1 if behind_one_port else 2, config, each=() if behind_one_port else each) as s,
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: len(s.app.fleet.endpoints) == 2)
        picture, clock = FleetPicture(), ManualClock()
        feed = FeedClient(session, s.admin, picture, clock, lambda: None)
        await feed.first()
        await feed.read(picture.rows())
        for number in range(4):
            await s.chat(f"Question {number}. " * 50, max_tokens=5)
        await s.idle()
        clock.advance(4.0)
        await feed.read(picture.rows())
        (pod,) = picture.rows()
        assert pod.figures.tokens == pytest.approx(5.0)
        assert sorted(rank.figures.tokens or 0.0 for rank in pod.ranks) == [pytest.approx(2.5), pytest.approx(2.5)]
        assert pod.figures.ttft_90 is not None


async def run(s: Stack, *arguments: str, **environ: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "top", "--url", s.admin, *arguments),
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.smoke
async def test_once_prints_every_pod_on_a_line_for_scripts() -> None:
    async with stack(3) as s:
        process = await run(s, "--once")
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors
    lines = output.decode().splitlines()
    assert "3 pods · 3 ready" in lines[0]
    titles = next(number for number, line in enumerate(lines) if line.startswith("POD"))
    assert len(lines[titles + 1 :]) == 3
    assert all(line.split()[2] == "ready" for line in lines[titles + 1 :])
    assert "\x1b" not in output.decode()


async def test_once_prints_sums_of_ranks_and_on_demand_the_ranks() -> None:
    async with stack(2, SimConfig(data_parallel_size=2)) as s:
        await until(lambda: len(s.app.fleet.endpoints) == 4)
        for arguments, names in (
            ((), ["pod-0", "pod-1"]),
            (("--ranks",), ["pod-0", "pod-0/0", "pod-0/1", "pod-1", "pod-1/0", "pod-1/1"]),
        ):
            process = await run(s, "--once", *arguments)
            output, errors = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, errors
            lines = output.decode().splitlines()
            assert "2 pods · 2 ready" in lines[0]
            titles = next(number for number, line in enumerate(lines) if line.startswith("POD"))
            assert [line.split()[0] for line in lines[titles + 1 :]] == names


async def test_a_closed_admin_port_is_an_error_of_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "top", "--url", "http://127.0.0.1:1"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1
    assert "is this the admin port" in errors.decode()


async def test_in_a_terminal_it_draws_reads_keys_and_restores_the_terminal() -> None:
    async with stack(3) as s:
        outer, inner = pty.openpty()
        before = termios.tcgetattr(inner)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "top", "--url", s.admin),
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
        )
        drawn = Drawn(outer)
        try:
            await until_drawn(drawn, "3 pods by FLY")
            os.write(outer, b"sr")
            await until_drawn(drawn, "3 pods by WAIT reversed")
            os.write(outer, b"q")
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            drawn.close()
        assert termios.tcgetattr(inner) == before
        os.close(inner)
        os.close(outer)


class Drawn:
    """What a terminal was sent."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.text = ""
        os.set_blocking(number, False)
        asyncio.get_running_loop().add_reader(number, self._read)

    def _read(self) -> None:
        with suppress(OSError):
            self.text += os.read(self._number, 1 << 16).decode("utf-8", "replace")

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._number)


async def until_drawn(drawn: Drawn, text: str) -> None:
    async with asyncio.timeout(PATIENCE):
        while text not in drawn.text:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("count", "words"), [(0, "0 pods"), (1, "1 pod"), (2, "2 pods")])
def test_one_pod_is_counted_in_the_singular(count: int, words: str) -> None:
    lines = screen(picture_of({f"pod-{n}": row() for n in range(count)}), View(), (80, 24), 0.0).plain.split("\n")
    assert f" · {words}" in lines[0]
    assert lines[-1].startswith(f"{words} by")


def test_the_header_has_as_many_lines_as_the_screen_reserves() -> None:
    lines = screen(picture_of({"only": row()}), View(), (80, 24), 0.0).plain.split("\n")
    assert lines[HEAD].startswith("only")
