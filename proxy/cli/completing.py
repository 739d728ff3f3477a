"""What shells offer as values: names of pods that a running proxy has, plugin types, files."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import click
from click.shell_completion import CompletionItem

from proxy.cli.admin_port import DEFAULT_URL, answered, in_full
from proxy.core.errors import ConfigError
from proxy.core.registry import Registry

TIMEOUT = 2.0
"""Seconds that somebody who has pressed a key may be kept waiting."""

Completion = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def pods_in(*states: str) -> Completion:
    """Names of the pods that are in one of these states, or of all; nothing where no proxy answers."""

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
    """For arguments that may be files and need not be."""
    return [CompletionItem(begun, type="file")]


def _beginning(begun: str, words: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(word) for word in words if word.startswith(begun)]


def _pods(context: click.Context) -> list[Any]:
    url = in_full(context, context.command.params[0], context.params.get("url")) or DEFAULT_URL
    key = context.params.get("key") or ""
    try:
        status, said = asyncio.run(answered(url.rstrip("/") + "/admin/pods", key, timeout=TIMEOUT))
    except (aiohttp.ClientError, OSError, ValueError):
        return []
    pods: list[Any] = said["pods"] if status == 200 else []
    return pods
