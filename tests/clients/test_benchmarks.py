"""Load generators that people use, before simulated pods behind kvlane: `make test-clients` installs and runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from proxy.lab.sim import SimConfig
from tests.clients.running import PROGRAMS, PYTHON, ROOT, authenticator, needs, output_of
from tests.helpers.scenarios.stack import stack

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
QUICK = SimConfig(time_scale=5)
REQUESTS = 12
OUTPUT_TOKENS = 8
"""Tokens."""


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
async def test_vllm_bench_serve_completes_every_request(backend: str, tmp_path: Path) -> None:
    needs(VLLM, "vLLM (make test-vllm)")
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    arguments = ["--backend", backend, "--endpoint", path, "--model", "sim", "--tokenizer", tokenizer(tmp_path)]
    load = ["--dataset-name", "random", "--random-input-len", "20", "--random-output-len", str(OUTPUT_TOKENS)]
    load += ["--num-prompts", str(REQUESTS), "--max-concurrency", "4", "--disable-tqdm"]
    result = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    async with stack(2, QUICK) as s:
        async with authenticator(s, f"vllm-bench-{backend}") as url:
            command = [str(VLLM), str(PROGRAMS / "vllm_bench.py"), "--base-url", url, *arguments, *load, *result]
            await output_of(command, {"VLLM_TARGET_DEVICE": "cpu"})
        found = json.loads((tmp_path / "result.json").read_text())
        assert (found["completed"], found["failed"]) == (REQUESTS, 0)
        assert found["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
        await s.idle()


async def test_aiperf_completes_every_request(tmp_path: Path) -> None:
    needs(aiperf := PYTHON.with_name("aiperf"), "aiperf")
    arguments = ["--model", "sim", "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer(tmp_path)]
    load = ["--concurrency", "4", "--request-count", str(REQUESTS), "--isl", "20", "--osl", str(OUTPUT_TOKENS)]
    quiet = ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1"]
    quiet += ["--artifact-dir", str(tmp_path)]
    async with stack(2, QUICK) as s:
        async with authenticator(s, "aiperf") as url:
            command = [str(aiperf), "profile", "--url", url, *arguments, *load, *quiet]
            await output_of(command, {"HF_HUB_OFFLINE": ""})  # offline it takes a folder for a name
        found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
        assert found["request_count"]["avg"] == REQUESTS
        assert not found.get("error_request_count", {}).get("avg")
        await s.idle()


def tokenizer(folder: Path) -> str:
    """Of bytes: both would download one of a model."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    there = folder / "tokenizer"
    there.mkdir()
    bytewise.save(str(there / "tokenizer.json"))
    (there / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (there / "config.json").write_text('{"model_type": "llama"}')
    return str(there)
