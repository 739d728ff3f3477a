"""Responses of pods as values."""

import asyncio
import contextlib
from pathlib import Path
from typing import get_args

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Freshness
from proxy.fleet.dialects import DIALECTS, Dialect, Engine, specs
from proxy.fleet.scrape import (
    MODELS_BYTES,
    MODELS_OPENINGS,
    MOST_SAMPLES,
    parse,
    parse_in_steps,
    parse_models,
)
from proxy.telemetry.exposition import STEP, ScrapeError

VLLM = DIALECTS["vllm"]
REAL = (Path(__file__).parent / "vllm_metrics.txt").read_bytes()


def test_an_exposition_of_vllm_is_parsed() -> None:
    metrics = parse(REAL, VLLM, scraped_at=5.0)
    assert (metrics.waiting, metrics.running) == (8, 12)
    assert metrics.kv_usage == pytest.approx(0.41682974)
    assert (metrics.block_size, metrics.blocks) == (32, 512)
    assert (metrics.prefix_queries, metrics.prefix_hits) == (8104, 256)
    assert metrics.process_started == pytest.approx(1795245182.29)
    assert (metrics.scraped_at, metrics.freshness) == (5.0, Freshness.FRESH)


def test_the_adapter_series_with_the_largest_value_counts() -> None:
    metrics = parse(REAL, VLLM)
    assert metrics.active_models == metrics.waiting_models == frozenset({"adapter1"})
    assert metrics.max_active_models == 2


def test_adapter_names_are_trimmed() -> None:
    text = b'vllm:lora_requests_info{max_lora="4",running_lora_adapters=" a , b,",waiting_lora_adapters=""} 1\n'
    metrics = parse(text, VLLM)
    assert metrics.active_models == frozenset({"a", "b"})
    assert metrics.waiting_models == frozenset()


def test_the_old_names_of_vllm_are_parsed() -> None:
    text = b"vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_queries_total 7\nvllm:gpu_prefix_cache_hits_total 3\n"
    metrics = parse(text, VLLM)
    assert (metrics.kv_usage, metrics.prefix_queries, metrics.prefix_hits) == (0.5, 7, 3)


def test_the_new_name_counts_if_both_are_present() -> None:
    assert parse(b"vllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.25\n", VLLM).kv_usage == 0.25


def test_ranks_are_summed_and_shares_averaged_with_any_order_of_lines() -> None:
    ranks = [
        f'vllm:num_requests_waiting{{engine="{rank}"}} {rank + 1}.0\n'
        f'vllm:num_requests_running{{engine="{rank}"}} 10.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.{rank + 2}\n'
        f'vllm:cache_config_info{{block_size="16",engine="{rank}",num_gpu_blocks="100"}} 1.0\n'
        f'vllm:prefix_cache_queries_total{{engine="{rank}"}} 5.0\n'
        for rank in range(2)
    ]
    metrics = parse("".join(ranks).encode(), VLLM)
    assert (metrics.waiting, metrics.running, metrics.prefix_queries) == (3, 20, 10)
    assert metrics.kv_usage == pytest.approx(0.25)
    assert (metrics.block_size, metrics.blocks) == (16, 200)


def test_a_longer_name_is_another_family() -> None:
    text = b'vllm:num_requests_waiting_by_reason{reason="capacity"} 9\nvllm:num_requests_waiting 2\n'
    assert parse(text, VLLM).waiting == 2


def test_comments_and_mentions_in_other_lines_are_not_samples() -> None:
    text = (
        b'# HELP vllm:num_requests_waiting 7\nother{x="vllm:num_requests_waiting 8"} 9\nvllm:num_requests_waiting 1\n'
    )
    assert parse(text, VLLM).waiting == 1


def test_a_missing_family_leaves_its_default() -> None:
    metrics = parse(b"vllm:num_requests_running 3\n", VLLM)
    assert (metrics.running, metrics.waiting, metrics.kv_usage, metrics.blocks) == (3, 0, 0.0, 0)


def test_label_values_may_contain_braces_and_exemplars_are_ignored() -> None:
    text = b'vllm:num_requests_waiting{a="}, {\\"} 5"} 4 # {trace_id="x"} 77 1.5\n'
    assert parse(text, VLLM).waiting == 4


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "x", "", "-3"])
def test_an_impossible_count_is_none(value: str) -> None:
    text = f"vllm:num_requests_waiting {value}\nvllm:num_requests_running 1\n"
    assert parse(text.encode(), VLLM).waiting == 0


def test_a_share_stays_between_zero_and_one() -> None:
    assert parse(b"vllm:kv_cache_usage_perc 1.5\n", VLLM).kv_usage == 1.0
    assert parse(b"vllm:kv_cache_usage_perc -1\n", VLLM).kv_usage == 0.0


def test_blocks_unknown_to_the_engine_are_none() -> None:
    metrics = parse(b'vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n', VLLM)
    assert (metrics.block_size, metrics.blocks) == (16, 0)


@pytest.mark.parametrize(
    "text", [b"", b"<html>no</html>", b"process_start_time_seconds 5\n", b"sglang:token_usage 1\n"]
)
def test_an_exposition_without_engine_metrics_is_an_error(text: bytes) -> None:
    with pytest.raises(ScrapeError):
        parse(text, VLLM)


def test_sglang_is_parsed_with_both_prefixes() -> None:
    for mark in (":", "_"):
        text = (
            f'sglang{mark}num_queue_reqs{{m="x"}} 2\nsglang{mark}num_running_reqs{{m="x"}} 3\n'
            f"sglang{mark}token_usage 0.25\n"
            f'sglang{mark}cache_config_info{{page_size="64",num_pages="1000"}} 1\n'
            f'sglang{mark}cached_tokens_total{{cache_source="device"}} 5\n'
        )
        metrics = parse(text.encode(), DIALECTS["sglang"])
        assert (metrics.waiting, metrics.running, metrics.kv_usage) == (2, 3, 0.25)
        assert (metrics.block_size, metrics.blocks, metrics.prefix_hits) == (64, 1000, 5)


def test_atom_is_parsed() -> None:
    text = (
        b"atom:num_requests_waiting 1\natom:num_requests_running 2\natom:kv_cache_usage_perc 0.5\n"
        b'atom:cache_config_info{block_size="16",num_gpu_blocks="400"} 1\n'
    )
    metrics = parse(text, DIALECTS["atom"])
    assert (metrics.waiting, metrics.running, metrics.kv_usage) == (1, 2, 0.5)
    assert (metrics.block_size, metrics.blocks) == (16, 400)


def test_trtllm_serve_is_parsed() -> None:
    text = (
        b"trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
        b"trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks 400\n"
    )
    metrics = parse(text, DIALECTS["trtllm-serve"])
    assert (metrics.waiting, metrics.running, metrics.kv_usage) == (1, 2, 0.5)
    assert (metrics.block_size, metrics.blocks) == (32, 400)


def test_values_of_triton_differ_by_labels() -> None:
    text = (
        b'nv_trt_llm_request_metrics{request_type="waiting",v="1"} 3\n'
        b'nv_trt_llm_request_metrics{request_type="scheduled",v="1"} 4\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.75\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 900\n'
    )
    metrics = parse(text, DIALECTS["triton-tensorrt-llm"])
    assert (metrics.waiting, metrics.running, metrics.kv_usage) == (3, 4, 0.75)
    assert (metrics.block_size, metrics.blocks) == (64, 900)


def test_of_other_models_of_triton_only_waiting_requests_are_known() -> None:
    text = b'nv_inference_pending_request_count{model="a"} 3\nnv_inference_exec_count{model="a"} 4000\n'
    metrics = parse(text, DIALECTS["triton"])
    assert (metrics.waiting, metrics.running, metrics.kv_usage) == (3, 0, 0.0)


def test_llamacpp_is_parsed() -> None:
    text = b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\nllamacpp:kv_cache_usage_ratio 0.1\n"
    metrics = parse(text, DIALECTS["llamacpp"])
    assert (metrics.waiting, metrics.running, metrics.kv_usage) == (1, 2, 0.1)


def test_every_engine_that_may_be_configured_has_a_dialect() -> None:
    assert set(DIALECTS) == set(get_args(Engine))


def test_custom_values_become_attributes() -> None:
    dialect = VLLM.with_attributes({"temp": "gpu_temp{gpu=0}", "power": "gpu_power", "none": "", "absent": "nowhere"})
    text = (
        b'gpu_temp{gpu="1"} 90\ngpu_temp{gpu="0"} 50\ngpu_temp{gpu="0",x="y"} 60\n'
        b'gpu_power{gpu="0"} 100 1000\ngpu_power{gpu="1"} 200 3000\ngpu_power{gpu="2"} 300 2000\n'
    )
    assert parse(text, dialect).attributes == {"temp": 50.0, "power": 200.0}


def test_lines_may_end_as_on_windows_and_the_last_without_an_end() -> None:
    metrics = parse(b"vllm:num_requests_running 3\r\nvllm:num_requests_waiting 4", VLLM)
    assert (metrics.running, metrics.waiting) == (3, 4)


_NAMES = st.sampled_from(sorted(VLLM.names))
_PIECES = st.one_of(
    st.binary(max_size=20),
    _NAMES.map(str.encode),
    st.sampled_from(
        [b"\n", b" ", b"{", b"}", b'"', b"\\", b",", b"=", b"1e308", b"9" * 400, b"nan", b"max_lora=", b"# {"]
    ),
)


@given(st.lists(_PIECES, max_size=60).map(b"".join))
def test_malformed_text_gives_sane_metrics_or_a_scrape_error(text: bytes) -> None:
    try:
        metrics = parse(text, VLLM)
    except ScrapeError:
        return
    assert metrics.waiting >= 0
    assert metrics.running >= 0
    assert 0 <= metrics.kv_usage <= 1
    assert metrics.block_size >= 0
    assert metrics.blocks >= 0


def test_a_dialect_knows_all_required_families() -> None:
    dialect = Dialect(waiting=specs("a"), lora=specs("b"), block_size=specs("c{k=v}")).with_attributes({"x": "d"})
    assert dialect.names == {"a", "b", "c", "d"}


def test_a_model_list_gives_its_cards_with_all_their_fields() -> None:
    body = b'{"object":"list","data":[{"id":"m","max_model_len":8192,"parent":null},{"id":"lora","parent":"m"}]}'
    assert parse_models(body) == ({"id": "m", "max_model_len": 8192, "parent": None}, {"id": "lora", "parent": "m"})


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b'{"data":1}', b'{"data":[1]}', b'{"data":[{"id":7}]}', b'{"data":["x"]}']
)
def test_a_malformed_model_list_is_an_error(body: bytes) -> None:
    with pytest.raises(ScrapeError):
        parse_models(body)


@pytest.mark.parametrize(
    "size",
    [
        b"[" * 300 + b"]" * 300,
        b'{"x":' * 300 + b"1" + b"}" * 300,
        b'"' + b"x" * MODELS_BYTES + b'"',
        b"[" + b"[]," * MODELS_OPENINGS + b"0]",
    ],
)
def test_a_model_list_too_large_or_deep_for_workers_is_an_error(size: bytes) -> None:
    with pytest.raises(ScrapeError, match=r"nested|larger|more than"):
        parse_models(b'{"data":[{"id":"m","x":%b}]}' % size)


def test_sums_of_large_values_fit_into_json() -> None:
    lines = [
        b'vllm:prefix_cache_queries_total{engine="%d"} 1e308\n'
        b'vllm:prompt_tokens_total{engine="%d"} 1e308\n'
        b'vllm:cache_config_info{num_gpu_blocks="999999999999999",block_size="16",engine="%d"} 1\n' % (at, at, at)
        for at in range(99)
    ]
    metrics = parse(b"".join(lines), VLLM)
    numbers = (metrics.prefix_queries, metrics.progress, metrics.blocks)
    assert orjson.loads(orjson.dumps(numbers)) == [2.0**53] * 3


@given(st.binary())
def test_any_bytes_are_a_model_list_or_a_scrape_error(body: bytes) -> None:
    with contextlib.suppress(ScrapeError):
        assert all(card["id"] for card in parse_models(body))


def test_progress_is_the_sum_of_input_and_output() -> None:
    ranks = b"".join(
        b'vllm:prompt_tokens_total{engine="%d"} 100\nvllm:generation_tokens_total{engine="%d"} 7\n' % (rank, rank)
        for rank in range(2)
    )
    assert parse(ranks, VLLM).progress == 214
    assert parse(b"vllm:generation_tokens_total 0\n", VLLM).progress == 0


@pytest.mark.parametrize(
    ("engine", "grows"), [("vllm", True), ("sglang", True), ("llamacpp", True), ("triton-tensorrt-llm", False)]
)
def test_an_engine_without_token_counters_has_no_progress(engine: str, grows: bool) -> None:
    dialect = DIALECTS[engine]
    assert bool(dialect.prompt_tokens and dialect.generation_tokens) is grows
    assert parse(f"{dialect.waiting[0].name} 1\n".encode(), dialect).progress == -1


async def test_a_large_exposition_is_parsed_in_steps() -> None:
    filler = b"".join(b'vllm:latency_bucket{le="%d"} 1\n' % number for number in range(100_000))
    text = b"vllm:num_requests_running 2\n" + filler + b"vllm:num_requests_waiting 3\n"
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.ensure_future(others())
    metrics = (await parse_in_steps(text, VLLM)).total
    other.cancel()
    assert (metrics.running, metrics.waiting) == (2, 3)
    assert turns >= len(text) // STEP - 1


async def test_an_exposition_with_too_many_series_of_a_family_is_refused_after_its_first_steps() -> None:
    series = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % number for number in range(100_000))
    with pytest.raises(ScrapeError, match=f"more than {MOST_SAMPLES} series of vllm:num_requests_running"):
        await parse_in_steps(series, VLLM)
    assert parse(b"\n".join(series.splitlines()[:MOST_SAMPLES]), VLLM).running == MOST_SAMPLES


def test_an_exposition_with_a_line_longer_than_a_step_is_refused() -> None:
    names = b"a," * STEP
    with pytest.raises(ScrapeError, match=f"a line of more than {STEP} bytes"):
        parse(b'vllm:lora_requests_info{running_lora_adapters="%b"} 1\nvllm:num_requests_running 1\n' % names, VLLM)


def test_any_number_of_adapter_series_is_read_and_the_newest_counts() -> None:
    series = [
        b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a%d",waiting_lora_adapters=""} %d\n'
        % (number, 7 if number == 4321 else 1)
        for number in range(10_000)
    ]
    assert parse(b"".join(series), VLLM).active_models == frozenset({"a4321"})
