"""What a real engine published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

SAMPLES = sorted(Path(__file__).with_name("samples").glob("*.jsonl"))


def payloads(sample: Path) -> list[bytes]:
    return [msgpack.packb(_bytes(json.loads(line)["batch"])) for line in sample.read_text().splitlines()]


def _bytes(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"]) if set(value) == {"bytes"} else {k: _bytes(v) for k, v in value.items()}
    return [_bytes(item) for item in value] if isinstance(value, list) else value
