"""`kvlane sim`: simulated vLLM pods on consecutive ports."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

import click
import uvloop

from proxy.core.errors import without_extra
from proxy.lab.sim import SimConfig
from proxy.lab.sim import serve as serve_pods
from proxy.lab.sim.config import HARDWARE, ConnectorName, Role

DEFAULT = SimConfig()
ROLES: dict[str, Role] = {"P": "prefill", "D": "decode", "E": "encode", "B": "both"}


def _roles(context: click.Context, parameter: click.Parameter, value: str | None) -> list[Role]:
    if value is None:
        return []
    if not re.fullmatch(r"(\d*[PDEB])+", value):
        raise click.BadParameter(f"{value!r} is not of the form 2P2D: numbers of P, D, E and B")
    return [ROLES[letter] for count, letter in re.findall(r"(\d*)([PDEB])", value) for _ in range(int(count or 1))]


Command = TypeVar("Command", bound=Callable[..., Any])


def _of_config(name: str, number: click.ParamType[Any], help: str | None = None) -> Callable[[Command], Command]:
    """Return an option for a field of SimConfig."""
    default = getattr(DEFAULT, name.replace("-", "_"))
    return click.option(f"--{name}", type=number, default=default, show_default=True, help=help)


LARGEST_PORT = 65535
COUNT, FACTOR = click.IntRange(1), click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of the pods.")
@click.option(
    "--port",
    type=click.IntRange(1, LARGEST_PORT),
    required=True,
    help="Port of the first pod; the others use the next ports.",
)
@click.option("--pods", type=COUNT, default=1, show_default=True, help="Number of pods.")
@click.option(
    "--roles",
    callback=_roles,
    metavar="2P2D",
    help="Instead of --pods: numbers of prefill (P), decode (D) and encode pods (E), and of pods for all stages (B).",
)
@click.option(
    "--connector",
    type=click.Choice([name for name in get_args(ConnectorName) if name]),
    default="nixl",
    show_default=True,
    help="Connector that transfers KV caches between pods with roles.",
)
@_of_config("model", click.STRING, "Name of the model.")
@click.option("--lora", multiple=True, help="Name of a LoRA adapter that every pod serves too; repeatable.")
@click.option(
    "--gpu",
    multiple=True,
    type=click.Choice(list(HARDWARE)),
    help="GPU and model whose speed, memory and token budget a pod has; repeatable, for pods in turn.",
)
@click.option(
    "--gpu-blocks",
    type=COUNT,
    help=f"Size of the KV cache, in blocks.  [default: of --gpu, else {DEFAULT.num_gpu_blocks}]",
)
@_of_config("block-size", COUNT, "Tokens per block.")
@_of_config("max-num-seqs", COUNT, "Largest number of running requests of a pod.")
@click.option(
    "--slow-pod", type=FACTOR, default=1.0, show_default=True, help="Factor by which the first pod is slower."
)
@_of_config("noise", click.FloatRange(min=0), "Standard deviation of the random factor of the time of each step.")
@_of_config("time-scale", FACTOR, "Factor by which simulated time is faster than real time.")
@_of_config(
    "data-parallel-size",
    COUNT,
    "Data-parallel ranks of each pod behind its port, each with a queue and a KV cache of its own.",
)
@click.option(
    "--lockstep", is_flag=True, help="Make all ranks of a pod step together, as with a mixture-of-experts model."
)
@click.option("--ignore-rank", is_flag=True, help="Ignore X-data-parallel-rank, as vLLM before 0.10 does.")
@click.option(
    "--kv-events-port",
    type=click.IntRange(0, LARGEST_PORT),
    default=DEFAULT.kv_events_port,
    help="Port of the KV events of the first pod; further ranks and pods use the next ports.  [default: none]",
)
@click.option("--old-metric-names", is_flag=True, help="Use the metric names of vLLM before 0.10.")
def sim(
    host: str,
    port: int,
    pods: int,
    roles: list[Role],
    connector: ConnectorName,
    lora: tuple[str, ...],
    gpu: tuple[str, ...],
    gpu_blocks: int | None,
    slow_pod: float,
    kv_events_port: int,
    **fields: Any,
) -> None:
    """Run simulated vLLM pods, with the engine's API, batching and prefix cache, but without a model.

    \b
    kvlane sim --port 8101 --pods 3 --slow-pod 5
    kvlane sim --port 8101 --roles 2P2D --connector nixl
    kvlane sim --port 8101 --data-parallel-size 8
    kvlane sim --port 8101 --pods 2 --gpu h100-llama-3.1-8b --gpu a100-llama-3.1-8b

    Ctrl-C ends them. Exit code 1: a port is in use. 2: there are not enough ports after the first.
    """
    config = SimConfig(lora_adapters=lora, connector=connector if roles else "", **fields)
    kinds = [HARDWARE[name].equip(config) for name in gpu] or [config]
    each: list[Role] = roles or ["both"] * pods
    if (last := port + len(each) - 1) > LARGEST_PORT:
        raise click.UsageError(f"{len(each)} pods need the ports {port} to {last}; the largest port is {LARGEST_PORT}")
    configs = []
    for at, role in enumerate(each):
        own = replace(kinds[at % len(kinds)], noise_seed=at, role=role)
        if kv_events_port:
            own = replace(own, kv_events_port=kv_events_port + at * own.data_parallel_size)
        configs.append(own if gpu_blocks is None else replace(own, num_gpu_blocks=gpu_blocks))
    configs[0] = replace(configs[0], slowdown=slow_pod)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve_pods(configs, host=host, port=port, begun=lambda: _print(configs, host, port)))
    except ImportError as error:
        raise without_extra("--kv-events-port", "precise") from error
    except OSError as error:
        advice = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise click.ClickException(f"cannot listen: {error.strerror or error}{advice}") from None


def _print(configs: Sequence[SimConfig], host: str, port: int) -> None:
    count = len(configs)
    last = f" to {port + count - 1}" if count > 1 else ""
    roles = f": {', '.join(config.role for config in configs)}" if configs[0].connector else ""
    size = configs[0].data_parallel_size
    ranks = f" with {size} ranks{' each' * (count > 1)}" if size > 1 else ""
    pods = f"{count} simulated pod{'s' * (count > 1)}{ranks}"
    click.echo(f"{pods} of model {configs[0].model!r} on {host}, port {port}{last}{roles}")
