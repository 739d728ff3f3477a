"""Responses of simulated pods to prompts that later prompts continue."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from proxy.core.request import BYTES_PER_TOKEN
from proxy.lab.sim.sequence import text_hash
from proxy.lab.workload import Job, prompt_text


def responses(jobs: Iterable[Job]) -> dict[int, bytes]:
    """Return the required responses by the hash of the prompt, so that later prompts continue them."""
    return {text_hash(prompt_text(job)): _response(job) for job in jobs if job.continued}


def _response(job: Job) -> bytes:
    whole = replace(job, ids=job.continued, prompt_tokens=job.prompt_tokens + job.output_tokens)
    return prompt_text(whole)[job.prompt_tokens * BYTES_PER_TOKEN :]
