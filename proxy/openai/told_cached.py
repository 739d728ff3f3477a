"""How much of a prompt was cached, in usage of pods that had the whole of its cache from another one."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson

from proxy.openai.events import FLAT_OBJECT

_USAGE = re.compile(rb'("usage"\s*:\s*)(' + FLAT_OBJECT + rb")")
"""With objects of details in it, which have none in them. Inside a JSON string the quotes are escaped."""


def telling(cached: int) -> Callable[[bytes], bytes]:
    """Says so wherever usage with prompt tokens is given, be it in events or in a whole answer."""
    return partial(_USAGE.sub, partial(_told, cached))


def _told(cached: int, found: re.Match[bytes]) -> bytes:
    try:
        usage: dict[str, Any] = orjson.loads(found[2])
    except orjson.JSONDecodeError:
        return found[0]
    if "cache_read_input_tokens" in usage:
        usage["cache_read_input_tokens"] = cached
    elif "prompt_tokens" in usage:
        _put(usage, "prompt_tokens_details", cached)
    elif "input_tokens_details" in usage:
        _put(usage, "input_tokens_details", cached)
    else:
        return found[0]
    return found[1] + orjson.dumps(usage)


def _put(usage: dict[str, Any], name: str, cached: int) -> None:
    details = usage.get(name)
    usage[name] = {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}
