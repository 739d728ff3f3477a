from __future__ import annotations

import pytest

from proxy.lab.sim import SimConfig
from proxy.lab.sim.config import HARDWARE


@pytest.mark.parametrize("name", HARDWARE)
def test_a_pod_on_other_hardware_keeps_its_own_settings(name: str) -> None:
    hardware, config = HARDWARE[name], SimConfig(model="mine", block_size=32, noise=0.3, slowdown=2.0)
    pod = hardware.equip(config)
    assert (pod.model, pod.block_size, pod.noise, pod.slowdown) == ("mine", 32, 0.3, 2.0)
    assert pod.timing == hardware.timing
    assert pod.max_num_batched_tokens == hardware.max_num_batched_tokens
    assert 0 <= hardware.kv_tokens - pod.num_gpu_blocks * 32 < 32


def test_an_h100_is_faster_in_proportion_to_its_data_sheet() -> None:
    """989 TFLOP/s against 312."""
    one, other = (
        HARDWARE[name].timing.step(8_192, 1, 8_192 * 8_193 / 2) for name in ("a100-llama-3.1-8b", "h100-llama-3.1-8b")
    )
    assert one / other == pytest.approx(989 / 312, rel=0.25)
