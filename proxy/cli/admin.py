"""Commands that talk to the admin port of a running proxy: `top`, `drain`, `undrain`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn
from urllib.parse import quote

import aiohttp
import click
import orjson
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.live import Live
from rich.text import Text

from proxy import outbound
from proxy.core.errors import BadRequest, ConfigError, cause
from proxy.core.ports import SystemClock
from proxy.core.registry import Registry
from proxy.core.tasks import Tasks
from proxy.dashboard.client import READ_INTERVAL, FeedClient, FleetPicture, PodView, Refused
from proxy.dashboard.terminal import HEAD, View, head, pressed, screen, table, typed
from proxy.http.admin_pods import seconds_of

TIMEOUT = 30.0
"""Seconds to wait for a response of the admin port."""

DEFAULT_URL = "http://localhost:9190"
KEY_VARIABLE = "KVLANE_ADMIN_KEY"

NO_SUCH_PATH = "No such path"
"""Beginning of the data port's response to an unknown path."""

WHICH_PORT = "is this the admin port, 9190 unless configured?"


def in_full(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the complete URL: `localhost:9190` has the same meaning as in a browser."""
    return value if not value or "://" in value else f"http://{value}"


url_option = click.option(
    "--url", default=DEFAULT_URL, show_default=True, callback=in_full, help="Admin port of the proxy."
)
key_option = click.option("--key", envvar=KEY_VARIABLE, default="", help=f"Of the admin port; or in {KEY_VARIABLE}.")


def path_of(pod: str, verb: str) -> str:
    return f"/admin/pods/{quote(pod, safe='')}/{verb}"


def fetched(
    url: str, path: str, key: str, query: Mapping[str, str], body: bytes | None = None, timeout: float = TIMEOUT
) -> Any:
    """Return the JSON of a response; with a body, send a POST. End the command with the message of an error."""
    try:
        status, content = asyncio.run(response_of(url.rstrip("/") + path, key, query, body, timeout))
    except (*outbound.FAILURES, ValueError) as error:
        no_admin_port(url, error)
    if status >= 400:
        click.echo(_refusal(status, content), err=True)
        raise SystemExit(2)
    return content


async def response_of(
    url: str, key: str, query: Mapping[str, str] | None = None, body: bytes | None = None, timeout: float = TIMEOUT
) -> tuple[int, Any]:
    """Return the status and the JSON of the response."""
    method = "GET" if body is None else "POST"
    response = await outbound.fetch(method, url, timeout, headers=outbound.bearer(key), params=query, data=body)
    return response.status, orjson.loads(response.body)


def no_admin_port(url: str, error: Exception) -> NoReturn:
    click.echo(f"{url}: {cause(error)}; {_likely(error)}", err=True)
    raise SystemExit(2)


def hint(status: int, message: str = "") -> str:
    if message.startswith(NO_SUCH_PATH):
        return f" {WHICH_PORT.capitalize()}"
    return f" Give the key with --key, or in {KEY_VARIABLE}." if status in (401, 403) else ""


def _likely(error: Exception) -> str:
    """Return advice on an error, as far as the error identifies the cause."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "name a file with the authority that signed it: SSL_CERT_FILE=ca.pem kvlane ..."
    if isinstance(error, aiohttp.ClientSSLError):
        return "if the port speaks no TLS, write http://"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "if the port speaks TLS, write https://"
    return WHICH_PORT


def _refusal(status: int, content: Any) -> str:
    error = content.get("error") if isinstance(content, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if message is None:
        return f"it responded {status}; {WHICH_PORT}"
    return f"{message}{hint(status, message)}"


COMPLETION_TIMEOUT = 2.0
"""Timeout, in seconds, for completion while a user waits."""

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def pods_in(*states: str) -> Completion:
    """Return the names of pods in these states, or of all pods; an empty list if no proxy responds."""

    def offered(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        named = context.params.get(parameter.name or "") or ()
        return [
            CompletionItem(pod["name"], help=pod["state"])
            for pod in _pods(context)
            if pod["name"].startswith(begun) and pod["name"] not in named and (not states or pod["state"] in states)
        ]

    return offered


def plugin_types(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    try:
        return _beginning(begun, (one.plugin_type for one in Registry.discover()))
    except ConfigError:
        return []


def files(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete file names, for arguments that may be files or something else."""
    return [CompletionItem(begun, type="file")]


def _beginning(begun: str, words: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(begun)]


def _pods(context: click.Context) -> list[Any]:
    url = in_full(context, context.command.params[0], context.params.get("url")) or DEFAULT_URL
    key = context.params.get("key") or ""
    try:
        status, content = asyncio.run(response_of(url.rstrip("/") + "/admin/pods", key, timeout=COMPLETION_TIMEOUT))
    except (aiohttp.ClientError, OSError, ValueError):
        return []
    pods: list[Any] = content["pods"] if status == 200 else []
    return pods


STILL_BUSY = 1


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """Parse a duration as the admin port does, before any pod is drained."""
    try:
        return seconds_of(value)
    except BadRequest as error:
        raise click.BadParameter(str(error).removeprefix("wait: ")) from None


@click.command()
@click.argument(
    "pods", metavar="POD...", nargs=-1, required=True, shell_complete=pods_in("starting", "ready", "ejected")
)
@click.option(
    "--wait", metavar="TIME", default="0s", callback=_seconds, help="For the last request of each; 10m at most.  [0s]"
)
@url_option
@key_option
def drain(pods: tuple[str, ...], wait: float, url: str, key: str) -> None:
    """Send pods no new requests; running requests end normally. `kvlane undrain` returns pods to service.

    \b
    kvlane drain vllm-0 --wait 5m && kubectl delete pod vllm-0
    kvlane drain vllm-0 vllm-1 --url http://localhost:9190

    A drain survives a reload of kvlane, and ends with a restart. `kvlane top` shows the names.

    Exit code 0 if they drain, with --wait if they are empty; 1 if requests are left after that; 2 if there is no such
    pod, or no response.
    """
    for pod in pods:
        fetched(url, path_of(pod, "drain"), key, {}, b"")
    _warn(fetched(url, "/admin/pods", key, {})["pods"])
    left = 0
    for pod in pods:
        query = {"wait": f"{wait:g}s"} if wait else {}
        content = fetched(url, path_of(pod, "drain"), key, query, b"", TIMEOUT + wait)
        click.echo(f"{pod}: {content['state']}, {_requests(content)}")
        left += content["load"]["requests"]
    if wait and left:
        raise SystemExit(STILL_BUSY)


def _requests(pod: Any) -> str:
    left = pod["load"]["requests"]
    return f"{left} request{'s' * (left != 1)} left" if left else "empty"


def _warn(pods: list[Any]) -> None:
    for pool in sorted({pod["pool"] for pod in pods}):
        if not any(pod["state"] == "ready" for pod in pods if pod["pool"] == pool):
            text = f"Warning: no pod of the pool {pool} is ready: its requests are refused until one is."
            click.secho(text, fg="yellow", err=True)


@click.command()
@click.argument("pods", metavar="POD...", nargs=-1, required=True, shell_complete=pods_in("draining"))
@url_option
@key_option
def undrain(pods: tuple[str, ...], url: str, key: str) -> None:
    """Send pods requests again that `kvlane drain`, the dashboard or the admin port has drained.

    \b
    kvlane undrain vllm-0

    Exit code 0, or 2 if the pod does not exist, or the admin port does not respond.
    """
    for pod in pods:
        content = fetched(url, path_of(pod, "undrain"), key, {}, b"")
        click.echo(f"{pod}: {content['state']}")


WIDTH = 132
"""Width of output that does not go to a terminal, without the names of pods."""

REDRAW = 1.0
BETWEEN_LOOKS = 2.0
"""Seconds between the two reads of `--once`."""

PATIENCE = 9.0
"""Seconds to wait for the first figures of a proxy without viewers of its dashboard."""


@click.command("top")
@url_option
@key_option
@click.option("--once", is_flag=True, help="Print all pods once, and end.")
@click.option("--ranks", is_flag=True, help="Show the data-parallel ranks of each pod below it.")
def top(url: str, key: str, once: bool, ranks: bool) -> None:
    """The fleet, live: pods by load, state, KV cache, hit rate and latency.

    \b
    q           quit                      arrows up/down, PgUp, PgDn    scroll
    s, S        sort by the next column, the one before                 r  reverse
    o           show or hide the data-parallel ranks of pods

    FLY are requests that kvlane has at the pod, WAIT and RUN what the pod has of all, KV the used share of its cache.
    HIT, TTFT and TOK/S are what engines count themselves, over the last five seconds, of up to 40 pods that are on the
    screen; with --once over two seconds, of the first 40. Tokens and hits of the whole fleet are from the counters of
    the pods, or from the responses that report usage if pods do not count them; the line says which. Everything else is
    kvlane's own, and costs it what an open dashboard does. Where there is no terminal that can be drawn on, a table is
    printed again and again.

    Exit code 0, or 2 if the admin port does not respond, or requires a key.
    """
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_top(url, key, once, View(shows_ranks=ranks)))
    except Refused as error:
        click.echo(f"{url}: {error}{hint(error.status, str(error))}", err=True)
        raise SystemExit(2) from None
    except (*outbound.FAILURES, ValueError) as error:
        no_admin_port(url, error)


async def _top(url: str, key: str, once: bool, view: View) -> None:
    async with outbound.session(None, headers=outbound.bearer(key)) as session:
        shown = Shown(session, url, view)
        await shown.start()
        if once:
            await shown.print(BETWEEN_LOOKS)
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
            await shown.live()
        else:
            while True:
                await shown.print(READ_INTERVAL)


class Shown:
    """The screen of `top`. Lives as long as the command."""

    def __init__(self, session: aiohttp.ClientSession, url: str, view: View) -> None:
        self._clock = SystemClock()
        self._picture = FleetPicture()
        self._news = asyncio.Event()
        self._feed = FeedClient(session, url, self._picture, self._clock, self._news.set)
        self._console = Console() if sys.stdout.isatty() else Console(width=WIDTH, highlight=False)
        self._view = view
        self._over = False
        self.start = self._feed.first

    async def print(self, seconds: float) -> None:
        """Print all pods once, after this many seconds."""
        async with Tasks() as tasks:
            tasks.keep(self._feed.run, "events")
            await self._feed.read(self._visible())
            await asyncio.sleep(seconds)
            await self._feed.read(self._visible())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, PATIENCE - seconds)):
                    while not self._picture.totals(self._clock.now()):
                        self._news.clear()
                        await self._news.wait()
        self._check()
        width, rows, plain = self._console.width, self._view.rows(self._picture), not self._console.is_terminal
        if plain:
            width += max((len(row.name) for row in rows), default=0)
        lines = [*head(self._picture, width, self._clock.now(), self._wrong()), Text("")]
        lines += table(rows, self._view.order, width, for_scripts=plain)
        for line in lines:
            self._console.print(line, no_wrap=True, highlight=False, soft_wrap=True)

    async def live(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as drawn, typed(self._press):
            async with Tasks() as tasks:
                tasks.keep(self._feed.run, "events")
                tasks.keep(lambda: self._feed.read_engines(self._visible), "metrics-of-pods")
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
        self._view = self._view.scrolled(0, len(self._view.rows(self._picture)), self._rows)
        return screen(self._picture, self._view, self._console.size, self._clock.now(), self._wrong())

    def _press(self, key: str) -> None:
        self._over = key == "quit"
        self._view = pressed(key, self._view, len(self._view.rows(self._picture)), self._rows)
        self._news.set()

    @property
    def _rows(self) -> int:
        return max(1, self._console.size.height - HEAD - 1)

    def _visible(self) -> list[PodView]:
        """Return the pods on the screen, and the pods of the ranks on the screen."""
        rows = self._view.rows(self._picture)[self._view.top : self._view.top + self._rows]
        pods = {row.rank_of or row.name for row in rows}
        return [pod for pod in self._view.order.of(self._picture.rows()) if pod.name in pods]

    def _wrong(self) -> str:
        if not self._feed.wrong:
            return ""
        since = self._clock.now() - self._feed.wrong_since
        return f"no connection for {since:.0f} s, trying again: {self._feed.wrong}"
