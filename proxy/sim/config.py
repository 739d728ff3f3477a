"""What a simulated pod is like: its model, its memory, its speed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one engine step: `base + per_prefill_token · prefill tokens + per_sequence · running sequences`.

    The defaults resemble an 8B model in bf16 on one 80 GB GPU. `base`: each step reads 16 GB of weights, at 2.7 TB/s
    (H100: 3.35 TB/s peak). `per_prefill_token`: 16 GFLOP at 270 TFLOP/s, between an A100 and an H100.
    `per_sequence`: 128 KB of KV cache per token, so about 0.1 ms for a context of 2,000 tokens, and sampling.
    """

    base: float = 0.006
    per_prefill_token: float = 0.000_06
    per_sequence: float = 0.000_15

    def step(self, prefill_tokens: int, sequences: int) -> float:
        return self.base + self.per_prefill_token * prefill_tokens + self.per_sequence * sequences


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulated pod. The names are those of the engine's own arguments where it has them."""

    model: str = "sim"
    lora_adapters: tuple[str, ...] = ()
    max_model_len: int = 131_072
    block_size: int = 16
    num_gpu_blocks: int = 8_192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2_048
    max_waiting: int | None = None
    """Requests beyond `max_num_seqs + max_waiting` are refused with 503; None queues without limit, as vLLM does."""
    timing: StepTiming = field(default_factory=StepTiming)
    time_scale: float = 1.0
    """All waits are divided by it."""
    old_metric_names: bool = False
    prompt_tokens_details: bool = True
    default_max_tokens: int = 16
    eos_probability: float = 0.0
    """The chance of each token to end the answer; it depends on the text alone. 0 answers up to `max_tokens`."""
    seed: int = 0
    """Pods with the same seed answer the same prompt with the same text."""

    @property
    def context_length(self) -> int:
        """The most tokens of prompt and answer together."""
        return min(self.max_model_len, self.num_gpu_blocks * self.block_size)

    @property
    def models(self) -> tuple[str, ...]:
        return (self.model, *self.lora_adapters)
