"""`kvlane drain`: take pods out of service without anybody noticing, for maintenance."""

from __future__ import annotations

from typing import Any

import click

from proxy.cli.admin_port import TIMEOUT, asked, key_option, path_of, url_option
from proxy.cli.completing import pods_in
from proxy.core.errors import BadRequest
from proxy.http.admin_pods import seconds_of

STILL_BUSY = 1


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    """As the admin port would, but before anything is drained."""
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
    """Send pods no new requests; those that run end as if nothing were. `kvlane undrain` takes them back.

    \b
    kvlane drain vllm-0 --wait 5m && kubectl delete pod vllm-0
    kvlane drain vllm-0 vllm-1 --url http://localhost:9190

    It is forgotten when kvlane restarts, and remembered when it reloads. Names are those of `kvlane top`.

    Exit code 0 if they drain, with --wait if they are empty; 1 if requests are left after that; 2 if there is no such
    pod, or no answer.
    """
    for pod in pods:
        asked(url, path_of(pod, "drain"), key, {}, b"")
    _warn(asked(url, "/admin/pods", key, {})["pods"])
    left = 0
    for pod in pods:
        query = {"wait": f"{wait:g}s"} if wait else {}
        said = asked(url, path_of(pod, "drain"), key, query, b"", TIMEOUT + wait)
        click.echo(f"{pod}: {said['state']}, {_requests(said)}")
        left += said["load"]["requests"]
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
