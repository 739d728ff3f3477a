"""What pairs of a GPU and a model are like, from published figures.

`base`, `per_prefill_token` and `per_sequence` are the coefficients that BLIS fitted to runs of vLLM 0.8.4 (the
beta_coeffs of defaults.yaml in github.com/inference-sim/inference-sim, in microseconds: fixed, per prefill token, per
decoded token). They contain the attention of contexts of up to some thousand tokens only; what longer ones cost
follows from the data sheets:

    per_attended      4 · layers · hidden size FLOP for a pair of tokens, at the speed of FlashAttention: 500 TFLOP/s on
                      an H100 (FlashAttention-3, arXiv 2407.08608), 190 on an A100 (FlashAttention-2, arXiv 2307.08691)
    per_token_read    bytes of KV cache per token (Llama 3.1: 128 KiB for 8B, 320 KiB for 70B, bf16), at 80 % of the
                      memory's bandwidth (3.35 TB/s and 2.04 TB/s)

KV tokens are what 90 % of the memory leaves beside weights and activations. The token budget of a step is the default
of vLLM's server on that GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from proxy.lab.sim.config import SimConfig, StepTiming

H100_ATTENTION, A100_ATTENTION = 500e12, 190e12
"""FLOP per second."""

H100_MEMORY, A100_MEMORY = 0.8 * 3.35e12, 0.8 * 2.04e12
"""Bytes per second."""

LLAMA_8B_PAIR, LLAMA_70B_PAIR = 4 * 32 * 4096, 4 * 80 * 8192
"""FLOP of attention for a pair of tokens."""

LLAMA_8B_TOKEN, LLAMA_70B_TOKEN = 131_072, 327_680
"""Bytes of KV cache."""


@dataclass(frozen=True, slots=True)
class Hardware:
    timing: StepTiming = field(default_factory=StepTiming)
    kv_tokens: int = 410_000
    max_num_batched_tokens: int = 2_048

    def equip(self, config: SimConfig) -> SimConfig:
        """The same pod on this hardware: its step times, memory and token budget."""
        return replace(
            config,
            timing=self.timing,
            num_gpu_blocks=self.kv_tokens // config.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "generic-8b": Hardware(),
        "a100-llama-3.1-8b": Hardware(
            StepTiming(
                base=0.016442,
                per_prefill_token=47.84e-6,
                per_sequence=18.21e-6,
                per_attended=LLAMA_8B_PAIR / A100_ATTENTION,
                per_token_read=LLAMA_8B_TOKEN / A100_MEMORY,
            )
        ),
        "h100-llama-3.1-8b": Hardware(
            StepTiming(
                base=0.005753,
                per_prefill_token=17.25e-6,
                per_sequence=6.0e-6,
                per_attended=LLAMA_8B_PAIR / H100_ATTENTION,
                per_token_read=LLAMA_8B_TOKEN / H100_MEMORY,
            ),
            max_num_batched_tokens=8_192,
        ),
        "h100-tp4-llama-3.3-70b": Hardware(
            StepTiming(
                base=0.012601,
                per_prefill_token=76.42e-6,
                per_sequence=66.84e-6,
                per_attended=LLAMA_70B_PAIR / (4 * H100_ATTENTION),
                per_token_read=LLAMA_70B_TOKEN / (4 * H100_MEMORY),
            ),
            kv_tokens=450_000,
            max_num_batched_tokens=8_192,
        ),
    }
)
"""By name. `generic-8b` is between the A100 and the H100: the defaults of StepTiming."""
