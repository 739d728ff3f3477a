"""Whether placement is worth on real engines what its hit rate promises: conversations through two of them.

    python bench/real.py                     # starts two vLLMs on the CPU: .venv-vllm, see `make test-vllm`
    python bench/real.py --seeds 5 --users 8 --think 8

Users have chats that continue the engines' own responses, each at their own pace. kvlane without a configuration and
kvlane with nothing but a `round-robin-picker` take turns, each run a process without a past, each with words that no
engine has seen. Hits are what the engines report as `cached_tokens`.

What an uncached token costs is measured on the idle engines between the runs: prompts of one length with a growing
share of new tokens. Times the tokens that round robin has computed and the default has not, per request, it is the
difference that the hits alone promise for the mean time to first token. What is found beyond that is less waiting, or
chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp

from bench.placement.report import mean, percentile
from bench.rig import say, table
from bench.validation.calibrate import fitted
from bench.validation.real import Real
from bench.validation.script import ids
from tests.vllm import fleet as fleets
from tests.vllm.fleet import MODEL, Fleet

SYSTEM_WORDS, QUESTION_WORDS = (200, 400), (60, 160)
"""Of about 3.5 tokens each: contexts of 1,000 tokens in the first turn and up to 3,000 in the last."""

OUTPUT_TOKENS = 32
PROBED = 2_000
"""Tokens of a prompt that is a probe: a context in the middle of the conversations."""

NEW = (200, 400, 800, 1_200, 2_000)
"""How many of them are not cached."""

ROUND_ROBIN = "round robin"
POLICIES = {"default": "", ROUND_ROBIN: "scheduling: {plugins: [{type: round-robin-picker}]}"}
"""Configurations, but for the pods."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One response. Seconds and tokens."""

    first_token: float
    prompt_tokens: int
    cached_tokens: int
    pod: str

    @property
    def uncached(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Talk:
    """What a user will say, and after which pauses in seconds."""

    system: str
    questions: tuple[str, ...]
    pauses: tuple[float, ...]


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engines end with us then, too
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with fleets.running(fleets.written(options.python, folder), folder) as fleet:
            found = asyncio.run(_measured(fleet, folder, options))
    print(table(rows(found["runs"], found["probes"])))
    if options.json:
        shown = {name: [[asdict(turn) for turn in run] for run in runs] for name, runs in found["runs"].items()}
        options.json.write_text(json.dumps({**found, "runs": shown}, indent=1))


async def _measured(fleet: Fleet, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`runs`: turns by policy and run; `probes`: seconds to the first token by uncached tokens, each measured often."""
    runs: dict[str, list[list[Turn]]] = {name: [] for name in POLICIES}
    probes: dict[int, list[float]] = {tokens: [] for tokens in NEW}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True)) as session:
        for url in fleet.urls:
            await Real(session, url, MODEL).ask(ids(Random(0), 600), 20)
        for seed in range(options.seeds):
            for name in _in_turns(seed):
                await _probe(session, fleet, probes, Random(f"{seed} {name}"))
                spoken = talks(Random(seed), Random(f"{seed} {name} {time.time_ns()}"), options)
                config = f"pods: {{static: {json.dumps([{'url': url} for url in fleet.urls])}}}\n{POLICIES[name]}\n"
                with fleets.proxy([], folder / f"{name}-{seed}.log", config) as proxy:
                    runs[name].append(await _play(session, f"http://{proxy.http.host}", spoken))
                say(f"seed {seed}, {name}: {_line(runs[name][-1])}")
    return {"runs": runs, "probes": probes}


def _in_turns(seed: int) -> list[str]:
    """So that neither is always first."""
    return list(POLICIES)[:: -1 if seed % 2 else 1]


async def _probe(session: aiohttp.ClientSession, fleet: Fleet, probes: dict[int, list[float]], text: Random) -> None:
    for url in fleet.urls:
        real = Real(session, url, MODEL)
        for new, seconds in probes.items():
            known = ids(text, PROBED - new)
            if known:
                await real.ask(known, 1)
            seconds.append((await real.ask(known + ids(text, new), 1)).times[0])


def talks(shape: Random, words: Random, options: argparse.Namespace) -> list[Talk]:
    """The same `shape` with other `words` is the same but for the text."""
    made = []
    for _ in range(options.users):
        system = text(words, shape.randint(*SYSTEM_WORDS))
        turns = shape.randint(4, 6)
        questions = tuple(text(words, shape.randint(*QUESTION_WORDS)) for _ in range(turns))
        made.append(Talk(system, questions, tuple(shape.expovariate(1 / options.think) for _ in range(turns))))
    return made


def text(words: Random, count: int) -> str:
    return " ".join(f"{words.choice(VOCABULARY)}{words.randrange(1000)}" for _ in range(count))


VOCABULARY = ("engine", "router", "block", "token", "cache", "prefix", "queue", "stream", "answer", "kernel", "layer")


async def _play(session: aiohttp.ClientSession, url: str, spoken: Sequence[Talk]) -> list[Turn]:
    found = await asyncio.gather(*(_converse(session, url, talk) for talk in spoken))
    return [turn for turns in found for turn in turns]


async def _converse(session: aiohttp.ClientSession, url: str, talk: Talk) -> list[Turn]:
    messages, turns = [{"role": "system", "content": talk.system}], []
    for question, pause in zip(talk.questions, talk.pauses, strict=True):
        await asyncio.sleep(pause)
        messages.append({"role": "user", "content": question})
        turn, response = await _ask(session, url, messages)
        messages.append({"role": "assistant", "content": response})
        turns.append(turn)
    return turns


async def _ask(session: aiohttp.ClientSession, url: str, messages: Sequence[dict[str, str]]) -> tuple[Turn, str]:
    body = {"model": MODEL, "messages": messages, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    sent, first, output, usage = time.perf_counter(), 0.0, "", None
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - sent
                event = json.loads(line[6:])
                output += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                usage = event.get("usage") or usage
    assert usage is not None, f"no usage in the response of {response.headers['x-kvlane-endpoint']}"
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Turn(first, usage["prompt_tokens"], cached, response.headers["x-kvlane-endpoint"]), output


def rows(runs: dict[str, list[list[Turn]]], probes: dict[int, list[float]]) -> list[list[str]]:
    """A table: each policy, and what one has of the other."""
    per_token = seconds_per_token(probes)
    shown = [["", "requests", "TTFT mean", "p50", "p90", "hits", "uncached per request"]]
    for name, each in runs.items():
        turns = [turn for run in each for turn in run]
        first = sorted(turn.first_token for turn in turns)
        uncached = mean([turn.uncached for turn in turns])
        milliseconds = [f"{1000 * s:.0f} ms" for s in (mean(first), percentile(first, 0.5), percentile(first, 0.9))]
        shown.append([name, str(len(turns)), *milliseconds, f"{hit_rate(turns):.1%}", f"{uncached:.0f}"])
    promised, found = zip(*(_differences(*pair, per_token) for pair in _pairs(runs)), strict=True)
    shown.append([f"promised by hits, at {per_token * 1e6:.0f} us a token", "", _span(promised), *[""] * 4])
    shown.append(["found", "", _span(found), *[""] * 4])
    return shown


def seconds_per_token(probes: dict[int, list[float]]) -> float:
    """The slope of the medians over the tokens that were not cached."""
    medians = {tokens: median(seconds) for tokens, seconds in probes.items()}
    return fitted([(1.0, float(tokens)) for tokens in medians], list(medians.values()))[1]


def hit_rate(turns: Sequence[Turn]) -> float:
    return sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)


def _pairs(runs: dict[str, list[list[Turn]]]) -> list[tuple[list[Turn], list[Turn]]]:
    """Round robin and the default, by seed."""
    return list(zip(runs[ROUND_ROBIN], runs["default"], strict=True))


def _differences(one: Sequence[Turn], other: Sequence[Turn], per_token: float) -> tuple[float, float]:
    """Of the means, in seconds: promised, and found."""
    promised = mean([turn.uncached for turn in one]) - mean([turn.uncached for turn in other])
    found = mean([turn.first_token for turn in one]) - mean([turn.first_token for turn in other])
    return promised * per_token, found


def _span(seconds: Sequence[float]) -> str:
    each = ", ".join(f"{-1000 * one:+.0f}" for one in seconds)
    return f"{-1000 * mean(list(seconds)):+.0f} ms (by seed {each})"


def _line(turns: Sequence[Turn]) -> str:
    first = 1000 * mean([turn.first_token for turn in turns])
    pods = [sum(turn.pod == pod for turn in turns) for pod in sorted({turn.pod for turn in turns})]
    return f"{len(turns)} requests, TTFT {first:.0f} ms, hits {hit_rate(turns):.1%}, on pods {pods}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"), help="the one that has vLLM")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--think", type=float, default=6.0, help="seconds before a question, in the mean")
    parser.add_argument("--json", type=Path, help="writes every figure")
    return parser.parse_args()


if __name__ == "__main__":
    main()
