from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from proxy.lab.sim import SimConfig, SimEngine, SimPod
from proxy.lab.sim.metrics import expose
from proxy.lab.sim.sequence import cache_root
from tests.helpers.lab.sim.support import post, run, sequence

Samples = dict[str, float]


def samples(engine: SimEngine) -> Samples:
    """Values by name, without labels."""
    text = expose([engine], wall=1_000.0, started_at=900.0)
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def labels(engine: SimEngine, name: str) -> dict[str, str]:
    text = expose([engine], wall=1_000.0, started_at=900.0)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return dict(families[name].samples[0].labels)


def test_a_busy_engine_reports_its_load() -> None:
    engine = SimEngine(SimConfig(max_num_seqs=2, num_gpu_blocks=16))
    for text in (b"a", b"b", b"c"):
        engine.submit(sequence(64, 5, text=text), now=0.0)
    engine.step(0.0)
    found = samples(engine)
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:num_requests_waiting"] == 1
    assert found["vllm:kv_cache_usage_perc"] == 0.5
    assert found["process_start_time_seconds"] == 900


def test_a_name_of_any_characters_is_escaped() -> None:
    engine = SimEngine(SimConfig(model='a "model"\\of\nlines'))
    assert labels(engine, "vllm:num_requests_running")["model_name"] == 'a "model"\\of\nlines'


def test_an_engine_counts_tokens_not_requests() -> None:
    engine = SimEngine(SimConfig())
    for _ in range(2):
        engine.submit(sequence(64, 5), now=0.0)
        run(engine)
    found = samples(engine)
    assert found["vllm:prefix_cache_queries_total"] == 128
    assert found["vllm:prefix_cache_hits_total"] == 48
    assert found["vllm:prompt_tokens_total"] == 128
    assert found["vllm:generation_tokens_total"] == 10
    assert found["vllm:num_preemptions_total"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 2


def test_old_engines_have_old_names() -> None:
    found = samples(SimEngine(SimConfig(old_metric_names=True)))
    assert {"vllm:gpu_cache_usage_perc", "vllm:gpu_prefix_cache_queries_total"} <= found.keys()
    assert not {"vllm:kv_cache_usage_perc", "vllm:prefix_cache_queries_total"} & found.keys()


def test_the_cache_reports_its_size() -> None:
    config = labels(SimEngine(SimConfig(block_size=32, num_gpu_blocks=100)), "vllm:cache_config_info")
    assert (config["block_size"], config["num_gpu_blocks"]) == ("32", "100")


def test_adapters_are_listed_where_they_run_and_wait() -> None:
    engine = SimEngine(SimConfig(lora_adapters=("tuned", "other"), max_num_seqs=1))
    for adapter in ("tuned", "other"):
        waiting = sequence(10, 5, root=cache_root(adapter, None))
        waiting.adapter = adapter
        engine.submit(waiting, now=0.0)
    engine.step(0.0)
    assert labels(engine, "vllm:lora_requests_info") == {
        "max_lora": "2",
        "running_lora_adapters": "tuned",
        "waiting_lora_adapters": "other",
    }
    assert samples(engine)["vllm:lora_requests_info"] == 1_000


async def test_finished_requests_are_counted_by_reason(pod: SimPod, client: aiohttp.ClientSession) -> None:
    await post(client, "/v1/completions", prompt="x", max_tokens=2)
    async with client.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    reasons = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0}
