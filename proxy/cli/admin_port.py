"""Asks the admin port of a proxy that runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import aiohttp
import click
import orjson

from proxy import outbound
from proxy.core.errors import cause

TIMEOUT = 30.0
"""Seconds."""

DEFAULT_URL = "http://localhost:9190"
KEY_VARIABLE = "KVLANE_ADMIN_KEY"

NO_SUCH_PATH = "No such path"
"""So the data port begins."""

WHICH_PORT = "is this the admin port, 9190 unless configured?"

Command = TypeVar("Command", bound=Callable[..., Any])


def in_full(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """`localhost:9190` means what it means in a browser."""
    return value if not value or "://" in value else f"http://{value}"


def url_option(command: Command) -> Command:
    return click.option(
        "--url", default=DEFAULT_URL, show_default=True, callback=in_full, help="Admin port of the proxy."
    )(command)


def path_of(pod: str, verb: str) -> str:
    return f"/admin/pods/{quote(pod, safe='')}/{verb}"


def key_option(command: Command) -> Command:
    return click.option("--key", envvar=KEY_VARIABLE, default="", help=f"Of the admin port; or in {KEY_VARIABLE}.")(
        command
    )


def asked(
    url: str, path: str, key: str, query: Mapping[str, str], body: bytes | None = None, timeout: float = TIMEOUT
) -> Any:
    """The JSON of the answer; a body is posted. What is no good answer ends the command with what it says."""
    try:
        status, said = asyncio.run(answered(url.rstrip("/") + path, key, query, body, timeout))
    except (*outbound.FAILURES, ValueError) as error:
        no_admin_port(url, error)
    if status >= 400:
        click.echo(_refusal(status, said), err=True)
        raise SystemExit(2)
    return said


async def answered(
    url: str, key: str, query: Mapping[str, str] | None = None, body: bytes | None = None, timeout: float = TIMEOUT
) -> tuple[int, Any]:
    """The status and the JSON of the answer."""
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
    """What is to be done about it, as far as the error tells."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "name a file with the authority that signed it: SSL_CERT_FILE=ca.pem kvlane ..."
    if isinstance(error, aiohttp.ClientSSLError):
        return "if the port speaks no TLS, write http://"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "if the port speaks TLS, write https://"
    return WHICH_PORT


def _refusal(status: int, said: Any) -> str:
    error = said.get("error") if isinstance(said, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if message is None:
        return f"it answered {status}; {WHICH_PORT}"
    return f"{message}{hint(status, message)}"
