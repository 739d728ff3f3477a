"""The text of a prompt, and the blocks an engine makes of it: see `proxy.lab.prompts`; and what pods answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from proxy.lab.prompts import BYTES_PER_TOKEN, body, parts, parts_with_answer, text
from proxy.lab.sim.prompt import text_hash
from proxy.lab.workload import Job

__all__ = ["BYTES_PER_TOKEN", "answers", "body", "parts", "parts_with_answer", "text"]


def answers(jobs: Iterable[Job]) -> dict[int, bytes]:
    """What simulated pods have to answer, so that prompts that go on from an answer go on from this one."""
    return {text_hash(text(job)): _answer(job) for job in jobs if job.continued}


def _answer(job: Job) -> bytes:
    whole = replace(job, ids=job.continued, prompt_tokens=job.prompt_tokens + job.output_tokens)
    return text(whole)[job.prompt_tokens * BYTES_PER_TOKEN :]
