from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FRAMES = Path(__file__).resolve().parents[3] / "bench/frames.py"

MOST_FRAMES, MOST_FILES = 110, 35


def test_a_chat_request_crosses_few_frames_and_files() -> None:
    ran = subprocess.run([sys.executable, FRAMES, "--json"], check=True, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    assert max(found["frames"], found["stream"]) <= MOST_FRAMES
    assert max(found["files"], found["stream_files"]) <= MOST_FILES
    assert found["per_event"] == 1
