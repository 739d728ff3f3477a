"""What is found of pods that are well, and of pods with one fault each."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from proxy.cli import main
from proxy.core.endpoint import Metrics
from proxy.core.ports import SystemClock
from proxy.lab.sim import SimConfig, SimPod
from proxy.settings import from_mapping
from proxy.tools.findings import (
    Caching,
    Events,
    ExpositionFinding,
    Level,
    PodReport,
    TransferFinding,
    of_fleet,
    of_pod,
    recommended,
)
from proxy.tools.probe import idle_seconds, probe_pods, read_exposition
from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import stack
from tests.helpers.tools.pods import MANNER, FakePod, bad, of, seen, serving
from tests.helpers.waiting import PATIENCE

GOOD = PodReport(
    "http://a:1",
    health=200,
    version="1",
    models=("m",),
    exposition=ExpositionFinding("vllm", Metrics(block_size=16, blocks=10), 1000, 0.01),
    caching=Caching(reported=64, prompt_tokens=70),
    abort=0.04,
    skew=0.2,
    keep_alive=5.0,
    tokenize=0.004,
)


async def test_simulated_pods_have_no_findings() -> None:
    async with SimPod(SimConfig()) as pod:
        found = await seen(pod.url)
    assert bad(found) == set()
    assert (found.engine, found.models, found.version) == ("vllm", ("sim",), "0.32.0")
    assert found.caching is not None
    assert found.caching.reported == 64
    assert found.abort is not None
    assert found.abort < 1
    assert of(found, "block-size").text.startswith("16 tokens a block, 8192 blocks")
    assert found.keep_alive == math.inf


async def test_ranks_are_detected_and_tested() -> None:
    async with SimPod(SimConfig(data_parallel_size=3)) as pod:
        found = await seen(pod.url)
    assert bad(found) == set()
    assert of(found, "data-parallel").text.startswith("3 data-parallel ranks, each an endpoint")


async def test_a_pod_that_ignores_ranks_is_recognised() -> None:
    async with SimPod(SimConfig(data_parallel_size=3, ignore_rank=True)) as pod:
        found = await seen(pod.url)
    assert {check for check, _ in bad(found)} == {"data-parallel"}
    assert "ignores which of them" in of(found, "data-parallel").text


async def test_without_requests_no_engine_works() -> None:
    async with serving(FakePod()) as pod:
        found = await seen(pod.url, replace(MANNER, sends=False))
    assert "/v1/completions" not in pod.requested
    assert found.caching is None
    assert found.abort is None
    assert bad(found) == set()


async def test_a_healthy_pod_with_few_metrics_is_healthy() -> None:
    async with serving(FakePod()) as pod:
        found = await seen(pod.url)
    assert bad(found) == set()
    assert found.caching is not None
    assert found.caching.counted == 32
    assert [one.fix for one in of_pod(found) if one.check == "prefix-caching"][1].endswith("prompt-tokens-details")
    assert found.models == ("m",)


@pytest.mark.parametrize(
    ("pod", "check", "level", "word"),
    [
        (FakePod(caches=False), "prefix-caching", Level.FAULT, "computed again"),
        (FakePod(says_caching=False), "prefix-caching", Level.FAULT, "is off"),
        (FakePod(aborts=False), "abort", Level.FAULT, "goes on"),
        (FakePod(ahead=30), "clock", Level.WARNING, "ahead of this one"),
        (FakePod(ahead=-30), "clock", Level.WARNING, "behind this one"),
        (FakePod(health=404), "health", Level.FAULT, "404"),
        (FakePod(without="vllm:"), "engine", Level.FAULT, "does not see"),
        (FakePod(without="waiting"), "metrics", Level.WARNING, "lack waiting"),
        (
            FakePod(nixl=True, kv_params={"remote_engine_id": "x", "remote_host": "127.0.0.1"}),
            "connector",
            Level.WARNING,
            "fetch KV caches from 127.0.0.1",
        ),
        (
            FakePod(replies={"/server_info": {"vllm_config": "kv_connector='LMCacheConnectorV1'"}}),
            "connector",
            Level.WARNING,
            "LMCacheConnectorV1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_exactly_the_fault_is_found(pod: FakePod, check: str, level: Level, word: str) -> None:
    async with serving(pod):
        found = await seen(pod.url)
    assert bad(found) == {(check, level)}
    finding = next(one for one in of_pod(found) if one.is_bad)
    assert word in finding.text
    assert finding.fix


async def test_the_metrics_of_trtllm_serve_are_found_at_their_path() -> None:
    metrics = "trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
    trtllm = FakePod(caches=False, replies={"/metrics": []}, texts={"/prometheus/metrics": metrics})
    async with serving(trtllm), serving(FakePod()) as vllm:
        found, other = await seen(trtllm.url), await seen(vllm.url)
    assert found.engine == "trtllm-serve"
    assert of(found, "prefix-caching").level is Level.NOTE, "no counter shows cached tokens"
    written = recommended([found])["pods"]
    assert written == {
        "refresh": {"path": "/prometheus/metrics"},
        "static": [{"url": trtllm.url, "engine": "trtllm-serve"}],
    }
    from_mapping({"pods": written})
    assert "configure two pools" in next(one.fix for one in of_fleet([found, other]) if one.check == "metrics")


async def test_a_pod_that_cannot_complete_is_reported_as_not_tried() -> None:
    async with serving(FakePod(completes=False)) as pod:
        found = await seen(pod.url)
    assert bad(found) == set()
    assert "/v1/completions returns 404" in of(found, "prefix-caching").text
    assert of(found, "abort").level is Level.NOTE


async def test_a_request_on_a_busy_pod_is_not_judged() -> None:
    async with serving(FakePod(running=3)) as pod:
        assert (await seen(pod.url)).abort is None


async def test_an_unreachable_pod_is_a_fault_and_hides_no_other() -> None:
    async with serving(FakePod()) as pod:
        found = await probe_pods([f"http://127.0.0.1:{free_port()}", pod.url], MANNER, SystemClock(), Random(1))
    assert [bad(one) for one in found] == [{("reachable", Level.FAULT)}, set()]
    assert [one["url"] for one in recommended(found)["pods"]["static"]] == [pod.url]


async def test_role_and_connector_are_read_from_the_engine() -> None:
    info = {"vllm_config": "KVTransferConfig(kv_connector='MooncakeConnector', kv_role='kv_consumer')"}
    async with serving(FakePod(replies={"/server_info": info})) as pod:
        found = await seen(pod.url)
    assert found.transfer == TransferFinding("mooncake", "decode")


async def test_nixl_pods_are_recognised_by_their_series() -> None:
    left = {"remote_engine_id": "x", "remote_host": "10.0.0.1"}
    async with serving(FakePod(nixl=True, kv_params=left)) as pod:
        found = await seen(pod.url)
    assert found.transfer == TransferFinding("nixl", host="10.0.0.1")
    assert bad(found) == set()


@pytest.mark.parametrize("info", [None, {"vllm_config": "kv_connector='MooncakeConnector'"}])
async def test_a_connector_that_may_fail_on_it_is_sent_no_prompt_for_another_pod(info: dict[str, str] | None) -> None:
    async with serving(FakePod(replies={"/server_info": info} if info else {})) as pod:
        await seen(pod.url)
    assert pod.handed_over == 0


def test_the_exposition_of_a_real_engine_is_parsed() -> None:
    found = read_exposition((Path(__file__).parents[2] / "unit" / "fleet" / "vllm_metrics.txt").read_bytes())
    assert found is not None
    assert (found.engine, found.missing, found.old, found.connector) == ("vllm", (), (), "")
    assert found.labels["enable_prefix_caching"] == "True"
    assert found.metrics.block_size == 32


async def test_older_names_are_a_note() -> None:
    async with SimPod(SimConfig(old_metric_names=True)) as pod:
        found = await seen(pod.url)
    assert bad(found) == set()
    assert any("older names" in finding.text for finding in of_pod(found))


class TestKvEvents:
    async def test_a_publisher_is_recognised_by_its_greeting(self) -> None:
        async with saying(b"\xff" + bytes(8) + b"\x7f\x03") as port, serving(announcing(port)) as pod:
            found = await seen(pod.url)
        assert found.events == Events("127.0.0.1", port, speaks=True, announced=True)
        assert of(found, "kv-events").level is Level.OK

    async def test_another_greeting_is_no_publisher(self) -> None:
        async with saying(b"HTTP/1.1 400 Bad Request\r\n") as port, serving(announcing(port)) as pod:
            found = await seen(pod.url)
        assert bad(found) == {("kv-events", Level.WARNING)}

    async def test_missing_events_are_a_note(self) -> None:
        async with serving(FakePod()) as pod:
            found = await seen(pod.url, replace(MANNER, events_port=free_port()))
        assert of(found, "kv-events").level is Level.NOTE


class TestIdleConnections:
    @pytest.mark.parametrize(
        ("head", "close", "expected"),
        [(b"", True, 0.1), (b"connection: close\r\n", True, 0.0), (b"", False, math.inf)],
    )
    async def test_closed_ports_are_detected(self, head: bytes, close: bool, expected: float) -> None:
        reply = b"HTTP/1.1 200 OK\r\n" + head + b"content-length: 0\r\n\r\n"
        async with saying(reply, 0.1 if close else 5.0) as port:
            found = await idle_seconds(f"http://127.0.0.1:{port}", 0.5, SystemClock())
        assert found == pytest.approx(expected, abs=0.3)

    def test_a_pod_that_closes_idle_connections_early_is_warned_of(self) -> None:
        assert bad(replace(GOOD, keep_alive=2.0)) == {("keep-alive", Level.WARNING)}
        assert bad(replace(GOOD, keep_alive=0.0)) == {("keep-alive", Level.WARNING)}
        assert bad(GOOD) == set()


class TestTogether:
    def test_equal_pods_have_no_finding(self) -> None:
        assert of_fleet([GOOD, replace(GOOD, url="http://b:1")]) == []

    @pytest.mark.parametrize(
        ("other", "check"),
        [
            ({"version": "2"}, "version"),
            ({"max_model_len": 10}, "context"),
            ({"transfer": TransferFinding("mooncake")}, "connector"),
            ({"exposition": ExpositionFinding("vllm", Metrics(block_size=32), 1, 0.0)}, "block-size"),
        ],
    )
    def test_differences_are_reported(self, other: dict[str, Any], check: str) -> None:
        [finding] = of_fleet([GOOD, replace(GOOD, url="http://b:1", **other)])
        assert finding.check == check
        assert "http://b:1" in finding.text

    def test_pods_of_other_models_may_differ(self) -> None:
        assert of_fleet([GOOD, replace(GOOD, url="http://b:1", models=("n",), version="2")]) == []


class TestTheConfiguration:
    def test_for_plain_pods_it_is_their_list(self) -> None:
        found = recommended([GOOD, PodReport("http://b:1", unreachable="refused")])
        assert found == {"pods": {"static": [{"url": "http://a:1"}]}}

    def test_with_events_everywhere_it_is_exact(self) -> None:
        publishing = replace(GOOD, events=Events("a", 5557, speaks=True))
        other = replace(publishing, url="http://b:1", events=Events("b", 5600, speaks=True))
        found = recommended([publishing, other])
        assert found["pods"]["static"][1]["labels"] == {"kvlane/kv-events-port": "5600"}
        types = [plugin["type"] for plugin in found["scheduling"]["plugins"]]
        assert "precise-prefix-cache-producer" in types
        from_mapping(found)
        assert "scheduling" not in recommended([publishing, GOOD])

    def test_with_both_roles_it_splits_prompts(self) -> None:
        prefill = replace(GOOD, transfer=TransferFinding("mooncake", "prefill"))
        decode = replace(GOOD, url="http://b:1", transfer=TransferFinding("mooncake", "decode"))
        found = recommended([prefill, decode])
        settings = from_mapping(found)
        assert settings.disaggregation.connector == "mooncake"
        assert [pod.role for pod in settings.pods.static] == ["prefill", "decode"]
        assert "disaggregation" not in recommended([prefill])

    def test_it_names_other_engines_and_missing_health_paths(self) -> None:
        odd = replace(GOOD, health=404, exposition=ExpositionFinding("sglang", Metrics(), 1, 0.0))
        settings = from_mapping(recommended([odd]))
        assert settings.pods.static[0].engine == "sglang"
        assert settings.reliability.health.path is None


class TestTheCommand:
    async def test_it_prints_findings_and_a_valid_configuration(self) -> None:
        async with serving(FakePod(ahead=60)) as pod:
            result = await asyncio.to_thread(CliRunner().invoke, main, ["doctor", pod.url, "--timeout", "1"])
        assert result.exit_code == 1
        assert "warning clock" in result.stderr
        assert from_mapping(yaml.safe_load(result.stdout)).pods.static[0].url == pod.url
        with_decisions = from_mapping(yaml.safe_load(result.stdout.replace("# telemetry", "telemetry")))
        assert with_decisions.telemetry.decisions is not None

    async def test_it_prints_nothing_that_steers_the_terminal(self) -> None:
        async with serving(FakePod(replies={"/v1/models": {"data": [{"id": "m\x1b]0;title\x07"}]}})) as pod:
            words = ["doctor", pod.url, "--no-requests", "--timeout", "1"]
            result = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert r"serves m\x1b]0;title\x07" in result.stderr
        assert "\x1b" not in result.output

    async def test_it_prints_json_for_programs(self) -> None:
        async with serving(FakePod()) as pod:
            words = ["doctor", pod.url, "--json", "--no-requests", "--timeout", "1"]
            result = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert result.exit_code == 0
        info = json.loads(result.stdout)
        assert info["pods"][0]["keepAlive"] == "infinite"
        assert {finding["level"] for finding in info["findings"]} == {"ok", "note"}
        assert info["configuration"]["pods"]["static"] == [{"url": pod.url}]

    def test_it_accepts_urls_only(self) -> None:
        result = CliRunner().invoke(main, ["doctor", "vllm-0"])
        assert result.exit_code == 2
        assert "'vllm-0' is no URL of a pod" in result.output
        assert "ends in /v1" in CliRunner().invoke(main, ["doctor", "http://vllm-0:8000/v1"]).output

    async def test_https_at_a_port_without_tls_names_the_scheme(self) -> None:
        async with serving(FakePod()) as pod:
            words = ["doctor", pod.url.replace("http:", "https:"), "--no-requests", "--timeout", "1"]
            result = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert "if the port speaks no TLS, write http://\n" in result.stderr

    async def test_it_lists_omitted_pods_in_the_configuration(self) -> None:
        async with serving(FakePod()) as pod:
            gone = f"http://127.0.0.1:{free_port()}"
            words = ["doctor", pod.url, gone, "--no-requests", "--timeout", "1"]
            result = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert result.stdout.startswith(f"# left out, because it did not respond: {gone}\n")
        assert "Connection refused\n" in result.stderr
        assert [pod["url"] for pod in yaml.safe_load(result.stdout)["pods"]["static"]] == [pod.url]


def announcing(port: int) -> FakePod:
    return FakePod(replies={"/kv_event_sources": {"0": {"endpoint": f"tcp://*:{port}"}}})


@asynccontextmanager
async def saying(greeting: bytes, seconds: float = 5.0) -> AsyncIterator[int]:
    """Says this to everybody, and hangs up after these seconds unless the other side has."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        with suppress(TimeoutError):
            await asyncio.wait_for(until_end(reader), seconds)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait_for(ended.wait(), PATIENCE)


async def until_end(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(4096):
            pass


async def test_kvlane_itself_is_not_examined_as_a_pod() -> None:
    async with stack(1) as s:
        found = await probe_pods([s.url, s.admin], MANNER, SystemClock(), Random(1))
    for one in found:
        (finding,) = of_pod(one)
        assert (finding.level, finding.text) == (Level.FAULT, "this is a kvlane, not a pod")
    assert recommended(found)["pods"]["static"] == []
