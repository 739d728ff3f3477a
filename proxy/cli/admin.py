"""Commands that talk to the admin port of a running proxy: `top`, `drain`, `undrain`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
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
    """Return the complete URL: `localhost:9190` has the same meaning as in a browser. Raise BadParameter for an empty
    one, as of an unset variable of the shell."""
    if value == "":
        raise click.BadParameter("is empty; write http://HOST:9190")
    return value if not value or "://" in value else f"http://{value}"


url_option = click.option(
    "--url", default=DEFAULT_URL, show_default=True, callback=in_full, help="URL of the proxy's admin port."
)
key_option = click.option(
    "--key", envvar=KEY_VARIABLE, default="", help=f"Key of the admin port; default: ${KEY_VARIABLE}."
)


def fail(text: str) -> NoReturn:
    """End the command, which cannot be carried out."""
    click.echo(text, err=True)
    raise SystemExit(2)


def fetched(
    url: str,
    path: str,
    key: str,
    query: Mapping[str, str] | None = None,
    body: bytes | None = None,
    timeout: float = TIMEOUT,
) -> Any:
    """Return the JSON of a response; with a body, send a POST. End the command with the message of an error."""
    try:
        status, content = asyncio.run(_response(url, path, key, query, body, timeout))
    except (*outbound.FAILURES, ValueError) as error:
        fail(_unreachable(url, error))
    if status < 400:
        return content
    refusal = content.get("error") if isinstance(content, dict) else None
    message = refusal.get("message") if isinstance(refusal, dict) else None
    fail(f"it responded {status}; {WHICH_PORT}" if message is None else f"{message}{_hint(status, message)}")


async def _response(
    url: str, path: str, key: str, query: Mapping[str, str] | None, body: bytes | None, timeout: float
) -> tuple[int, Any]:
    method, url = "GET" if body is None else "POST", url.rstrip("/") + path
    response = await outbound.fetch(method, url, timeout, headers=outbound.bearer(key), params=query, data=body)
    return response.status, orjson.loads(response.body)


def _unreachable(url: str, error: Exception) -> str:
    advice = next((advice for kind, advice in _ADVICE.items() if isinstance(error, kind)), WHICH_PORT)
    return f"{url}: {cause(error)}; {advice}"


_ADVICE: Mapping[type[Exception], str] = {
    aiohttp.ClientConnectorCertificateError: "name a file with the authority that signed it: SSL_CERT_FILE=ca.pem"
    " kvlane ...",
    aiohttp.ClientSSLError: "if the port speaks no TLS, write http://",
    aiohttp.ServerDisconnectedError: "if the port speaks TLS, write https://",
}


def _hint(status: int, message: str) -> str:
    if message.startswith(NO_SUCH_PATH):
        return f" {WHICH_PORT.capitalize()}"
    return f" Give the key with --key, or in {KEY_VARIABLE}." if status in (401, 403) else ""


COMPLETION_TIMEOUT = 2.0
"""Timeout, in seconds, for completion while a user waits."""

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def pods_in(*states: str) -> Completion:
    """Return the names of pods in these states, or of all pods; an empty list if no proxy responds."""

    def offered(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
        named = context.params.get(parameter.name or "") or ()
        url = in_full(context, parameter, context.params.get("url")) or DEFAULT_URL
        key = context.params.get("key") or ""
        try:
            status, content = asyncio.run(_response(url, "/admin/pods", key, None, None, COMPLETION_TIMEOUT))
        except (*outbound.FAILURES, ValueError):
            return []
        return [
            CompletionItem(pod["name"], help=pod["state"])
            for pod in (content["pods"] if status == 200 else ())
            if pod["name"].startswith(begun) and pod["name"] not in named and (not states or pod["state"] in states)
        ]

    return offered


def plugin_types(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    try:
        names = [one.plugin_type for one in Registry.discover()]
    except ConfigError:
        return []
    return [CompletionItem(name) for name in names if name.startswith(begun)]


def files(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete file names, for arguments that may be files or something else."""
    return [CompletionItem(begun, type="file")]


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
    "--wait",
    metavar="TIME",
    default="0s",
    callback=_seconds,
    help="How long to wait for the last request of each pod, such as 30s; at most 10m.  [default: 0s]",
)
@url_option
@key_option
def drain(pods: tuple[str, ...], wait: float, url: str, key: str) -> None:
    """Take pods out of service: they get no new requests, and running requests end normally.

    \b
    kvlane drain vllm-0 --wait 5m && kubectl delete pod vllm-0
    kvlane drain vllm-0 vllm-1 --url http://localhost:9190

    `kvlane undrain` returns pods to service, `kvlane top` shows their names. A drain survives a reload of kvlane, but
    not a restart.

    Exit code 0: the pods drain; with --wait, they have no requests. 1: requests are left after --wait. 2: a pod does
    not exist, or the admin port does not respond.
    """
    for pod in pods:
        fetched(url, _path(pod, "drain"), key, body=b"")
    known = fetched(url, "/admin/pods", key)["pods"]
    for pool in sorted({pod["pool"] for pod in known} - {pod["pool"] for pod in known if pod["state"] == "ready"}):
        text = f"Warning: no pod of the pool {pool} is ready: its requests are refused until one is."
        click.secho(text, fg="yellow", err=True)
    busy = False
    for pod in pods:
        query = {"wait": f"{wait:g}s"} if wait else {}
        content = fetched(url, _path(pod, "drain"), key, query, b"", TIMEOUT + wait)
        left = content["load"]["requests"]
        click.echo(f"{pod}: {content['state']}, " + (f"{left} request{'s' * (left != 1)} left" if left else "empty"))
        busy |= left > 0
    if wait and busy:
        raise SystemExit(1)


def _path(pod: str, verb: str) -> str:
    return f"/admin/pods/{quote(pod, safe='')}/{verb}"


@click.command()
@click.argument("pods", metavar="POD...", nargs=-1, required=True, shell_complete=pods_in("draining"))
@url_option
@key_option
def undrain(pods: tuple[str, ...], url: str, key: str) -> None:
    """Return pods to service that `kvlane drain`, the dashboard or the admin port has drained.

    \b
    kvlane undrain vllm-0

    Exit code 0: success. 2: a pod does not exist, or the admin port does not respond.
    """
    for pod in pods:
        click.echo(f"{pod}: {fetched(url, _path(pod, 'undrain'), key, body=b'')['state']}")


WIDTH = 132
"""Width of output that does not go to a terminal, without the names of pods."""

REDRAW = 1.0
REDRAW_INTERVAL = 2.0
"""Seconds between the two reads of `--once`."""

PATIENCE = 9.0
"""Seconds to wait for the first figures of a proxy without viewers of its dashboard."""


@click.command("top")
@url_option
@key_option
@click.option("--once", is_flag=True, help="Print all pods once, and exit.")
@click.option("--ranks", is_flag=True, help="Show the data-parallel ranks of each pod below it.")
def top(url: str, key: str, once: bool, ranks: bool) -> None:
    """Show the pods live: state, load, KV cache, hit rate and latency.

    \b
    q           quit                      arrows up/down, PgUp, PgDn    scroll
    s, S        sort by the next or previous column                     r  reverse the order
    o           show or hide the data-parallel ranks of pods

    FLY is the number of kvlane's requests in flight on the pod, WAIT and RUN the waiting and running requests that the
    pod reports, from all clients, KV the used share of its cache. HIT, TTFT and TOK/S come from the counters of the
    engines over the last five seconds, for up to 40 pods on the screen; with --once, over two seconds, for the first
    40. Tokens and hits of the whole fleet come from the counters of the pods, or from the usage in responses if pods do
    not count them; the line says which. Without a terminal, the table is printed repeatedly.

    Exit code 0: success. 2: the admin port does not respond, or requires a key.
    """
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(_top(url, key, once, View(shows_ranks=ranks)))
    except Refused as error:
        fail(f"{url}: {error}{_hint(error.status, str(error))}")
    except (*outbound.FAILURES, ValueError) as error:
        fail(_unreachable(url, error))


async def _top(url: str, key: str, once: bool, view: View) -> None:
    async with outbound.session(None, headers=outbound.bearer(key)) as session:
        shown = Shown(session, url, view)
        await shown.feed.first()
        if once:
            await shown.print(REDRAW_INTERVAL)
        elif sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
            await shown.live()
        else:
            await shown.print(REDRAW_INTERVAL)
            while True:
                await shown.print(READ_INTERVAL)


class Shown:
    """The screen of `top`. Lives as long as the command."""

    def __init__(self, session: aiohttp.ClientSession, url: str, view: View) -> None:
        self._clock = SystemClock()
        self._picture = FleetPicture()
        self._news = asyncio.Event()
        self.feed = FeedClient(session, url, self._picture, self._clock, self._news.set)
        self._console = Console() if sys.stdout.isatty() else Console(width=WIDTH, highlight=False)
        self._view = view
        self._over = False

    async def print(self, seconds: float) -> None:
        """Print all pods once, after this many seconds."""
        async with Tasks() as tasks:
            tasks.keep(self.feed.run, "events")
            await self.feed.read(self._visible())
            await asyncio.sleep(seconds)
            await self.feed.read(self._visible())
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, PATIENCE - seconds)):
                    while not self._picture.totals(self._clock.now()):
                        self._news.clear()
                        await self._news.wait()
        self._check()
        width, rows, plain = self._console.width, self._view.rows(self._picture), not self._console.is_terminal
        if plain:
            width += max((len(row.name) for row in rows), default=0)
        lines = head(self._picture, width, self._clock.now(), self._wrong())
        for line in (*lines, Text(""), *table(rows, self._view.order, width, for_scripts=plain)):
            self._console.print(line, no_wrap=True, highlight=False, soft_wrap=True)

    async def live(self) -> None:
        with Live(console=self._console, screen=True, auto_refresh=False) as drawn, typed(self._press):
            async with Tasks() as tasks:
                tasks.keep(self.feed.run, "events")
                tasks.keep(lambda: self.feed.read_engines(self._visible), "metrics-of-pods")
                while not self._over and self.feed.refused is None:
                    self._view = self._view.scrolled(0, len(self._view.rows(self._picture)), self._rows)
                    now, size = self._clock.now(), self._console.size
                    drawn.update(screen(self._picture, self._view, size, now, self._wrong()), refresh=True)
                    self._news.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(REDRAW):
                            await self._news.wait()
        self._check()

    def _check(self) -> None:
        if self.feed.refused is not None:
            raise self.feed.refused

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
        if not self.feed.wrong:
            return ""
        since = self._clock.now() - self.feed.wrong_since
        return f"no connection for {since:.0f} s, trying again: {self.feed.wrong}"
