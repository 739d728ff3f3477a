"""Durations, sizes and points in time as people write them."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import NewType

Duration = NewType("Duration", float)
"""Seconds. Written `250ms`, `15s`, `5m`, `1h30m` (Go's notation), or a number of seconds."""

Size = NewType("Size", int)
"""Bytes or a count. Written `64MiB`, `10Gi`, `1k` (Kubernetes' notation), or a whole number."""

Moment = NewType("Moment", float)
"""Seconds since the Unix epoch. Written `2027-01-31`, which begins that day, or `2027-01-31T18:00:00Z`; UTC unless it
says otherwise."""

_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d)")
_SIZE_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kMGTP", 1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kKMGTP]|[KMGTP]i)B?")


def parse_duration(text: str) -> Duration:
    """Raises ValueError, saying what a duration looks like."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration; write 250ms, 15s, 5m or 1h30m")
    return Duration(sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts))


def parse_size(text: str) -> Size:
    """Raises ValueError, saying what a size looks like."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"{text!r} is not a size; write 64MiB, 10Gi, 1k or a whole number")
    number, unit = match.groups()
    return Size(int(float(number) * _SIZE_UNITS["k" if unit == "K" else unit]))


def moment(value: str | date) -> Moment:
    """Raises ValueError, saying what a point in time looks like."""
    try:
        read = datetime.fromisoformat(value if isinstance(value, str) else value.isoformat())
        return Moment((read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise ValueError(f"{str(value)!r} is no date or time; write 2027-01-31 or 2027-01-31T18:00:00Z") from None
