"""`kvlane doctor`: what real pods are like, what is wrong with them, and a configuration for them."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import click
import yaml

from proxy.core.clock import SystemClock
from proxy.core.params import plain
from proxy.fleet.settings import PodSettings
from proxy.tools.findings import Finding, Level, Seen, of_fleet, of_pod, recommended
from proxy.tools.probe import EVENTS_PORT, IDLE, Manner, look_at

TO_MEND = 1

WORTH_A_LOOK = "# telemetry: {decisions: {}}  # keeps the latest decisions, for the dashboard and for kvlane explain"

_COLOURS = {Level.OK: "green", Level.NOTE: "blue", Level.WARNING: "yellow", Level.FAULT: "red"}


def _urls(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    for url in value:
        try:
            PodSettings(url)
        except ValueError as error:
            raise click.BadParameter(str(error).removeprefix("url: ")) from None
    return list(dict.fromkeys(url.rstrip("/") for url in value))


@click.command()
@click.argument("urls", metavar="URL...", nargs=-1, required=True, callback=_urls)
@click.option("--api-key", envvar="VLLM_API_KEY", default="", help="Sent to the pods; or in VLLM_API_KEY.")
@click.option("--no-requests", is_flag=True, help="Only ask: leave out what makes the engines work.")
@click.option("--events-port", type=click.IntRange(1, 65535), default=EVENTS_PORT, show_default=True)
@click.option("--timeout", type=click.FloatRange(0.1), default=10.0, show_default=True, help="Seconds for one answer.")
@click.option("--json", "as_json", is_flag=True, help="Print everything that was seen as JSON.")
def doctor(urls: list[str], api_key: str, no_requests: bool, events_port: int, timeout: float, as_json: bool) -> None:
    """Examine running pods: what engine they are, whether placement can see their load and their cache, whether they
    stop working when a client leaves; and print what to mend, and a configuration that begins with what is there.

    \b
    kvlane doctor http://vllm-0:8000 http://vllm-1:8000 > kvlane.yaml

    The findings go to standard error, the configuration to standard output. Each pod gets about four short completions
    and one long one that is left after its first token; where the engine hands KV caches over by NIXL, one of them
    leaves a block of cache for another pod. It takes about ten seconds, most of it to see when idle connections are
    closed. Of pods that serve no request alone, as with P2P NCCL, only ask: --no-requests.

    Exit code 0 if nothing is to be mended, 1 if there is a warning or a fault, 2 if the command cannot be understood.
    """
    manner = Manner(api_key, timeout, not no_requests, events_port, idle=min(timeout, IDLE))
    if sys.stderr.isatty():
        click.echo("Looking, for about ten seconds ...", err=True)
    pods = asyncio.run(look_at(urls, manner, SystemClock(), Random()))
    found = [finding for pod in pods for finding in of_pod(pod)] + of_fleet(pods)
    configuration = recommended(pods)
    if as_json:
        click.echo(json.dumps(_json(pods, found, configuration), indent=2, ensure_ascii=False))
    else:
        for line in _lines(found):
            click.echo(line, err=True)
        if configuration["pods"]["static"]:
            for pod in pods:
                if pod.unreachable:
                    click.echo(f"# left out, as it did not answer: {pod.url}")
            click.echo(yaml.safe_dump(configuration, sort_keys=False, width=120), nl=False)
            click.echo(WORTH_A_LOOK)
    if any(finding.is_bad for finding in found):
        raise SystemExit(TO_MEND)


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Under the URL of each pod; those of all pods come last."""
    pod = None
    for finding in findings:
        if finding.pod != pod:
            pod = finding.pod
            yield click.style(pod or "all pods", bold=True)
        level = click.style(f"{finding.level.value:8}", fg=_COLOURS[finding.level])
        yield f"  {level}{finding.check:15} {finding.text}"
        if finding.fix:
            yield f"{'':26}{finding.fix}"


def _json(pods: Sequence[Seen], found: Sequence[Finding], configuration: dict[str, Any]) -> dict[str, Any]:
    return {
        "pods": [_finite(plain(pod)) for pod in pods],
        "findings": [finding.as_json() for finding in found],
        "configuration": configuration,
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: it is text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return "infinite" if isinstance(value, float) and math.isinf(value) else value
