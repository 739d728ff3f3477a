"""The folder of a reader who follows the pages: every file that a command there names."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

from tests.helpers.docs.pages import ROOT
from tests.helpers.lab.traffic import conversations, fleet, head, record, written
from tests.unit.autoscale.test_replay import recorded
from tests.unit.cli.test_autoscale import QUESTION
from tests.unit.cli.test_replay import RANDOM, lines_of

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}]}
_VLLM = {"model": "hosted_vllm/m", "api_base": "http://a:1/v1"}
LITELLM = {"model_list": [{"model_name": "m", "litellm_params": _VLLM}]}
TRACE = [{"timestamp": at * 100, "input_length": 700, "output_length": 5, "hash_ids": [1, at + 2]} for at in range(20)]

TEXTS = {
    "kvlane.yaml": "pods: {static: [{url: http://vllm-0:8000}]}",
    "now.yaml": "{}",
    "other.yaml": RANDOM,
    "command.txt": "sglang-router --worker-urls http://a:1 http://b:1 \\\n  --policy round_robin",
    "dynamic_config.yaml": "static_models: {m: {static_backends: [http://a:1], static_model_type: chat}}",
    "picker.yaml": (ROOT / "config" / "endpoint-picker.yaml").read_text(),
    "config.yaml": json.dumps(LITELLM),
    "question.json": json.dumps(QUESTION),
    "body.json": json.dumps(CHAT),
    "trial.json": json.dumps({"request": CHAT, "scheduling": {"plugins": [{"type": "queue-scorer"}]}}),
}


def laid_out(folder: Path) -> None:
    """`record.jsonl` stands for what is in /var/log, too."""
    (folder / "config").symlink_to(ROOT / "config")
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    found = record(conversations(200, 8.0), fleet())
    sizes = [{"pod": pod, "block_size": 16, "blocks": 8_000} for pod in found.pods]
    written(folder / "record.jsonl", [head(), *sizes, *lines_of(found)])
    rows = "".join(json.dumps(row) + "\n" for row in TRACE)
    (folder / "conversation.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    history = {"pool": "default", "decisions": asyncio.run(recorded())}
    (folder / "history.json").write_text(json.dumps(history))
