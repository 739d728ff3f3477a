"""The GPU metrics of a DCGM exporter beside a pod."""

from __future__ import annotations

import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConnectRefused
from proxy.core.params import Duration
from proxy.core.ports import ManualClock
from proxy.fleet.refresh import RETRY, Gpus, utilization
from proxy.fleet.settings import DcgmSettings
from proxy.telemetry.exposition import ScrapeError


def line(value: float, pod: str = "", gpu: int = 0) -> str:
    of = f',pod="{pod}"' if pod else ""
    return f'DCGM_FI_DEV_GPU_UTIL{{gpu="{gpu}",modelName="H100"{of}}} {value}\n'


class Exporter:
    """Responds with the given text; None: the port is closed."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.requests: list[tuple[str, str | None]] = []

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        self.requests.append((url, api_key))
        if self.text is None:
            raise ConnectRefused("nobody listens")
        return 200, self.text.encode()


async def test_the_busiest_gpu_counts_as_a_share() -> None:
    assert await utilization((line(20) + line(75, gpu=1)).encode(), "a") == 0.75
    assert await utilization(line(0).encode(), "a") == 0.0
    assert await utilization(line(130).encode(), "a") == 1.0


@pytest.mark.parametrize("name", ["vllm-1", "default/vllm-1", "default/vllm-1-rank-0"])
async def test_only_the_pods_own_gpu_of_its_node_counts(name: str) -> None:
    assert await utilization((line(30, "vllm-1") + line(90, "vllm-10") + line(95, "other")).encode(), name) == 0.3


@pytest.mark.parametrize("text", ["", line(90, "other"), "DCGM_FI_DEV_SM_CLOCK 3\n", "DCGM_FI_DEV_GPU_UTIL NaN\n"])
async def test_a_metric_without_the_pod_is_missing(text: str) -> None:
    with pytest.raises(ScrapeError, match="DCGM_FI_DEV_GPU_UTIL"):
        await utilization(text.encode(), "vllm-1")


@pytest.mark.parametrize(
    ("settings", "labels", "url"),
    [
        (DcgmSettings(), {}, "http://10.0.0.1:9400/metrics"),
        (DcgmSettings(9401, "/gpus", "https"), {"status.hostIP": "10.1.1.1"}, "https://10.0.0.1:9401/gpus"),
        (DcgmSettings(on_node=True), {"status.hostIP": "10.1.1.1"}, "http://10.1.1.1:9400/metrics"),
        (DcgmSettings(on_node=True), {"status.hostIP": "fd00::1"}, "http://[fd00::1]:9400/metrics"),
        (DcgmSettings(on_node=True), {"kubernetes.io/hostname": "node-7"}, "http://node-7:9400/metrics"),
        (DcgmSettings(on_node=True), {}, "http://10.0.0.1:9400/metrics"),
    ],
)
async def test_the_exporter_is_near_the_pod_or_on_its_node_and_does_not_get_its_key(
    settings: DcgmSettings, labels: dict[str, str], url: str
) -> None:
    exporter = Exporter(line(50))
    gpus = Gpus(Endpoint("a", "http://10.0.0.1:8000", labels=labels, api_key="k"), exporter, ManualClock())
    await gpus.ask(settings)
    assert exporter.requests == [(url, None)]
    assert gpus.attributes == {"GPUUtilization": 0.5}


async def test_it_is_queried_at_its_interval() -> None:
    exporter, clock = Exporter(line(50)), ManualClock()
    gpus = Gpus(Endpoint("a", "http://a:1"), exporter, clock)
    for _ in range(5):
        await gpus.ask(DcgmSettings(interval=Duration(2.0)))
        clock.advance(1.0)
    assert len(exporter.requests) == 3


async def test_a_lost_exporter_is_logged_once_queried_rarely_and_its_values_expire(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exporter, clock = Exporter(line(50)), ManualClock()
    gpus = Gpus(Endpoint("a", "http://a:1"), exporter, clock)
    await gpus.ask(DcgmSettings())
    exporter.text = None
    for _ in range(11):
        clock.advance(RETRY / 5)
        await gpus.ask(DcgmSettings())
    assert gpus.attributes == {}
    assert len(exporter.requests) == 1 + 3
    assert len(caplog.records) == 1
    exporter.text = line(60)
    clock.advance(RETRY)
    await gpus.ask(DcgmSettings())
    assert gpus.attributes == {"GPUUtilization": 0.6}
