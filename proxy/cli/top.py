"""`kvlane top`: the fleet of a proxy that runs, in a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress

import aiohttp
import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from proxy import outbound
from proxy.cli.admin_port import hint, key_option, no_admin_port, url_option
from proxy.core.clock import SystemClock
from proxy.core.tasks import Tasks
from proxy.top.feed import LOOK_INTERVAL, Feed, Refused
from proxy.top.keys import pressed, typed
from proxy.top.order import Order
from proxy.top.picture import Picture
from proxy.top.screen import HEAD, View, head, screen, table

WIDTH = 132
"""Of what does not go to a terminal, beside the names of pods."""

REDRAW = 1.0
BETWEEN_LOOKS = 2.0
"""Seconds, where there are only two."""

PATIENCE = 9.0
"""Seconds until the first figures of a proxy whose dashboard nobody looks at."""


@click.command("top")
@url_option
@key_option
@click.option("--once", is_flag=True, help="Print all pods once, and end.")
def top(url: str, key: str, once: bool) -> None:
    """The fleet, live: pods by load, state, KV cache, hit rate and latency.

    \b
    q           quit                      arrows up/down, PgUp, PgDn    scroll
    s, S        sort by the next column, the one before                 r  reverse

    FLY are requests that kvlane has at the pod, WAIT and RUN what the pod has of all, KV the used share of its cache.
    HIT, TTFT and TOK/S are what engines count themselves, over the last five seconds, of up to 40 pods that are on the
    screen; with --once over two seconds, of the first 40. Tokens and hits of the whole fleet are from the counters of
    the pods, or from the responses that report usage if pods do not count them; the line says which. Everything else is
    kvlane's own, and costs it what an open dashboard does. Where there is no terminal that can be drawn on, a table is
    printed again and again.

    Exit code 0, or 2 if the admin port does not answer, or wants a key.
    """
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_top(url, key, once))
    except Refused as error:
        click.echo(f"{url}: {error}{hint(error.status, str(error))}", err=True)
        raise SystemExit(2) from None
    except (*outbound.FAILURES, ValueError) as error:
        no_admin_port(url, error)


async def _top(url: str, key: str, once: bool) -> None:
    async with outbound.session(None, headers=outbound.bearer(key)) as session:
        shown = Shown(session, url)
        await shown.begin()
        if once:
            await shown.print(BETWEEN_LOOKS)
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
            await shown.live()
        else:
            while True:
                await shown.print(LOOK_INTERVAL)


class Shown:
    """Lives as long as the command."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._clock = SystemClock()
        self._picture = Picture()
        self._news = asyncio.Event()
        self._feed = Feed(session, url, self._picture, self._clock, self._news.set)
        self._console = Console() if sys.stdout.isatty() else Console(width=WIDTH, highlight=False)
        self._view = View()
        self._over = False
        self.begin = self._feed.begin

    async def print(self, seconds: float) -> None:
        """All pods, as they are after so many seconds."""
        async with Tasks() as tasks:
            tasks.keep(self._feed.follow, "events")
            await self._feed.look_at(self._names())
            await asyncio.sleep(seconds)
            await self._feed.look_at(self._names())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, PATIENCE - seconds)):
                    while not self._picture.totals(self._clock.now()):
                        self._news.clear()
                        await self._news.wait()
        self._check()
        width, order, plain = self._console.width, Order(), not self._console.is_terminal
        if plain:
            width += max(map(len, self._picture.pods), default=0)
        lines = [*head(self._picture, width, self._clock.now(), self._wrong()), Text("")]
        lines += table(order.of(self._picture.rows()), order, width, for_scripts=plain)
        for line in lines:
            self._console.print(line, no_wrap=True, highlight=False, soft_wrap=True)

    async def live(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as drawn, typed(self._press):
            async with Tasks() as tasks:
                tasks.keep(self._feed.follow, "events")
                tasks.keep(lambda: self._feed.follow_engines(self._names), "metrics-of-pods")
                while not self._over and self._feed.refused is None:
                    drawn.update(self._drawn(), refresh=True)
                    self._news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(REDRAW):
                            await self._news.wait()
        self._check()

    def _check(self) -> None:
        if self._feed.refused is not None:
            raise self._feed.refused

    def _drawn(self) -> Text:
        self._view = self._view.scrolled(0, len(self._picture.pods), self._rows)
        return screen(self._picture, self._view, self._console.size, self._clock.now(), self._wrong())

    def _press(self, key: str) -> None:
        self._over = key == "quit"
        self._view = pressed(key, self._view, len(self._picture.pods), self._rows)
        self._news.set()

    @property
    def _rows(self) -> int:
        return max(1, self._console.size.height - HEAD - 1)

    def _names(self) -> list[str]:
        """Of the pods on the screen."""
        pods = self._view.order.of(self._picture.rows())
        return [pod.name for pod in pods[self._view.top : self._view.top + self._rows]]

    def _wrong(self) -> str:
        if not self._feed.wrong:
            return ""
        since = self._clock.now() - self._feed.wrong_since
        return f"no connection for {since:.0f} s, trying again: {self._feed.wrong}"
