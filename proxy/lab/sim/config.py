"""The configuration of a simulated pod, and published figures of GPUs and models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Role = Literal["both", "prefill", "decode", "encode"]
ConnectorName = Literal["", "nixl", "shared-storage", "mooncake", "sglang", "p2p-nccl"]


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one engine step, the sum of what it does:

        base                once: the weights are read, kernels are launched
        per_prefill_token   each token of a prompt that is computed
        per_sequence        each sequence in the step
        per_attended        each pair of a prompt's token and a token at or before it: what makes long prompts quadratic
        per_token_read      each token of KV cache that a decoding sequence reads

    The defaults resemble an 8B model in bf16 on one 80 GB GPU, between an A100 and an H100, with the attention of a
    usual context contained in the other terms; `HARDWARE` has figures for pairs of a GPU and a model.
    """

    base: float = 0.006
    per_prefill_token: float = 0.000_06
    per_sequence: float = 0.000_15
    per_attended: float = 0.0
    per_token_read: float = 0.0

    def step(self, prefill_tokens: int, sequences: int, attended: float = 0.0, tokens_read: int = 0) -> float:
        return (
            self.base
            + self.per_prefill_token * prefill_tokens
            + self.per_sequence * sequences
            + self.per_attended * attended
            + self.per_token_read * tokens_read
        )


@dataclass(frozen=True, slots=True)
class TransferTiming:
    """Seconds to transfer KV cache between pods: `base`, plus the time of 128 KiB at 200 Gbit/s for each token."""

    base: float = 0.005
    per_token: float = 5.2e-6
    expiry: float = 480.0
    """Seconds for which a cache is kept for another pod; vLLM's default."""
    failure: float = 5.0
    """Seconds until a pull of a missing cache fails."""

    def seconds(self, tokens: int) -> float:
        return self.base + self.per_token * tokens


@dataclass(frozen=True, slots=True)
class SimConfig:
    """The configuration of one simulated pod. Fields have the names of the engine's arguments where those exist."""

    model: str = "sim"
    lora_adapters: tuple[str, ...] = ()
    max_model_len: int = 131_072
    block_size: int = 16
    num_gpu_blocks: int = 8_192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    timing: StepTiming = field(default_factory=StepTiming)
    role: Role = "both"
    connector: ConnectorName = ""
    """The connector that transfers KV cache between pods; see `proxy.lab.sim.transfer`."""
    transfer: TransferTiming = field(default_factory=TransferTiming)
    ec_connector: Literal["example", "nixl"] = "example"
    """The connector that transfers embeddings: from a common directory, or from the encode pod that its response
    names."""
    encode_seconds: float = 0.05
    """Seconds to encode each image or other medium that is not in the encoder's cache."""
    slowdown: float = 1.0
    """Factor by which steps take longer than `timing`, for a pod that is throttled or older than the others."""
    noise: float = 0.0
    """Standard deviation of a log-normal factor of mean 1 on the duration of each step."""
    noise_seed: int = 0
    time_scale: float = 1.0
    """Divides all waits."""
    data_parallel_size: int = 1
    """Number of data-parallel ranks behind the port, each with its own scheduler, queue and KV cache. `num_gpu_blocks`,
    `max_num_seqs` and similar limits apply to each rank."""
    lockstep: bool = False
    """Whether all ranks step together, as for a mixture-of-experts model; otherwise each rank steps independently."""
    ignore_rank: bool = False
    """Whether to ignore the rank that a request names, as vLLM before 0.10 does."""
    kv_events_port: int = 0
    """The port on which the first rank publishes KV events; the other ranks use the following ports. 0 disables
    publishing."""
    old_metric_names: bool = False
    prompt_tokens_details: bool = True
    responses: Mapping[int, bytes] = field(default_factory=dict, compare=False)
    """Responses to prompts that are known beforehand, so that a later prompt can continue them: response text by the
    hash of the prompt's text (`proxy.lab.sim.sequence.text_hash`)."""
    seed: int = 0
    """Pods with the same seed generate the same response to the same prompt."""

    @property
    def context_length(self) -> int:
        """Largest number of tokens of prompt and response together."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)


H100, A100 = (500e12, 0.8 * 3.35e12), (190e12, 0.8 * 2.04e12)
"""FLOP per second of attention, and bytes per second of memory bandwidth."""

LLAMA_8B, LLAMA_70B = (4 * 32 * 4096, 131_072), (4 * 80 * 8192, 327_680)
"""FLOP of attention for a pair of tokens, and bytes of KV cache per token."""


@dataclass(frozen=True, slots=True)
class Hardware:
    timing: StepTiming = field(default_factory=StepTiming)
    kv_tokens: int = 410_000
    max_num_batched_tokens: int = 2_048

    def equip(self, config: SimConfig) -> SimConfig:
        """Return the configuration of the same pod on this hardware: its step times, memory and token budget."""
        return replace(
            config,
            timing=self.timing,
            num_gpu_blocks=self.kv_tokens // config.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


def _timing(
    gpu: tuple[float, float], model: tuple[int, int], base: float, per_prefill_token: float, per_sequence: float
) -> StepTiming:
    return StepTiming(base, per_prefill_token, per_sequence, model[0] / gpu[0], model[1] / gpu[1])


HARDWARE: Mapping[str, Hardware] = {
    "generic-8b": Hardware(),
    "a100-llama-3.1-8b": Hardware(
        _timing(A100, LLAMA_8B, base=0.016442, per_prefill_token=47.84e-6, per_sequence=18.21e-6)
    ),
    "h100-llama-3.1-8b": Hardware(
        _timing(H100, LLAMA_8B, base=0.005753, per_prefill_token=17.25e-6, per_sequence=6.0e-6),
        max_num_batched_tokens=8_192,
    ),
    "h100-tp4-llama-3.3-70b": Hardware(
        _timing(
            (4 * H100[0], 4 * H100[1]), LLAMA_70B, base=0.012601, per_prefill_token=76.42e-6, per_sequence=66.84e-6
        ),
        kv_tokens=450_000,
        max_num_batched_tokens=8_192,
    ),
}
"""Hardware by name. `generic-8b` is between the A100 and the H100: the defaults of StepTiming."""
