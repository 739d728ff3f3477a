"""`kvlane sim`: simulated vLLM pods on consecutive ports."""

from __future__ import annotations

import contextlib

import click
import uvloop

from proxy.sim import SimConfig
from proxy.sim import serve as serve_pods

DEFAULT = SimConfig()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="Port of the first pod; the others follow.")
@click.option("--pods", type=click.IntRange(1), default=1, show_default=True)
@click.option("--model", default="sim", show_default=True)
@click.option("--lora", multiple=True, help="Name of a LoRA adapter that every pod serves too; repeatable.")
@click.option(
    "--gpu-blocks",
    type=click.IntRange(1),
    default=DEFAULT.num_gpu_blocks,
    show_default=True,
    help="KV cache, in blocks.",
)
@click.option(
    "--block-size", type=click.IntRange(1), default=DEFAULT.block_size, show_default=True, help="Tokens per block."
)
@click.option("--max-num-seqs", type=click.IntRange(1), default=DEFAULT.max_num_seqs, show_default=True)
@click.option(
    "--time-scale",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Times faster than real.",
)
@click.option("--old-metric-names", is_flag=True, help="The metric names of vLLM before 0.10.")
def sim(
    host: str,
    port: int,
    pods: int,
    model: str,
    lora: tuple[str, ...],
    gpu_blocks: int,
    block_size: int,
    max_num_seqs: int,
    time_scale: float,
    old_metric_names: bool,
) -> None:
    """Run simulated vLLM pods: the wire formats, the batching and the prefix cache of the engine, and no model."""
    config = SimConfig(
        model=model,
        lora_adapters=lora,
        num_gpu_blocks=gpu_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        time_scale=time_scale,
        old_metric_names=old_metric_names,
    )
    last = f" to {port + pods - 1}" if pods > 1 else ""
    click.echo(f"{pods} simulated pod{'s' * (pods > 1)} of model {model!r} on {host}, port {port}{last}")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve_pods(config, pods=pods, host=host, port=port))
    except OSError as error:
        raise click.ClickException(f"cannot listen: {error.strerror or error}") from None
