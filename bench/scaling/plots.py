"""Replicas and load over time as PNG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.placement.plots import pyplot
from bench.scaling.fleet import ROLES
from bench.scaling.scene import Moment
from proxy.lab.workload import Job

BIN = 30.0
"""Seconds that arrivals are counted over."""


def write(load: str, jobs: Sequence[Job], seconds: float, found: Mapping[str, Sequence[Moment]], folder: Path) -> Path:
    """The tokens that come per second above, and below for each scaler the replicas that serve, and as a broken line
    those it wants. Raises NoMatplotlib."""
    plot = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plot.subplots(
        len(found) + 1, 1, figsize=(8, 2 * len(found) + 2), dpi=130, sharex=True, layout="constrained"
    )
    _arrivals(axes[0], jobs, seconds)
    axes[0].set(title=load, ylabel="tokens/s")
    for panel, (name, moments) in zip(axes[1:], found.items(), strict=True):
        minutes = [moment.at / 60 for moment in moments]
        for role, colour in zip(ROLES, ("C0", "C1"), strict=True):
            panel.plot(minutes, [moment.serving[role] for moment in moments], color=colour, label=role)
            panel.plot(minutes, [moment.wanted[role] for moment in moments], color=colour, linestyle=":", linewidth=1)
        panel.set(ylabel="pods", ylim=(0, None))
        panel.set_title(name, loc="left", fontsize="small")
    axes[-1].set(xlabel="minutes")
    for panel in axes[:2]:
        panel.legend(fontsize="small", frameon=False)
    for panel in axes:
        panel.grid(alpha=0.3)
    path = folder / f"autoscale-{load}.png"
    figure.savefig(path)
    plot.close(figure)
    return path


def _arrivals(panel: Any, jobs: Sequence[Job], seconds: float) -> None:
    prompts, outputs = ([0.0] * (int(seconds / BIN) + 1) for _ in range(2))
    for job in jobs:
        prompts[int(job.arrival / BIN)] += job.prompt_tokens / BIN
        outputs[int(job.arrival / BIN)] += job.output_tokens / BIN
    minutes = [at * BIN / 60 for at in range(len(prompts))]
    panel.plot(minutes, prompts, label="of prompts")
    panel.plot(minutes, outputs, label="of answers")
