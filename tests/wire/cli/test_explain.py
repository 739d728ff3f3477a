"""`kvlane explain --url`: what a terminal shows of a proxy that runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli.explain import explain
from tests.helpers.scenarios.stack import CHAT, Stack, stack

ON: Mapping[str, Any] = {"telemetry": {"accessLog": False, "decisions": {}}}
BODY = {"model": "sim", "messages": [{"role": "user", "content": "What is the sea? " * 50}], "max_tokens": 2}


async def run(s: Stack | None, *arguments: str, **environ: str) -> Result:
    url = [] if s is None else ["--url", s.admin]
    return await asyncio.to_thread(CliRunner().invoke, explain, [*url, *arguments], env=environ)


async def ask(s: Stack, *names: str) -> None:
    for name in names:
        response, _ = await s.post(CHAT, BODY, {"x-request-id": name})
        assert response.status == 200


async def test_a_list_a_single_decision_and_the_last_ones_are_shown() -> None:
    async with stack(3, settings=ON) as s:
        await ask(s, "first", "second")
        shown = await run(s)
        assert shown.exit_code == 0, shown.output
        assert "first" in shown.output
        assert "2 shown, 2 kept" in shown.output
        one = await run(s, "--id", "first")
        assert one.exit_code == 0, one.output
        for words in ("request first", "chosen: pod-", "of 3 candidates", "latency-scorer", "attempts", "complete 200"):
            assert words in one.output
        last = await run(s, "--last", "--json")
        assert json.loads(last.output)["request"] == "second"
        assert json.loads((await run(s, "--json", "--limit", "1")).output)["decisions"][0]["request"] == "second"


async def test_complete_responses_have_no_first_token_and_long_ids_show_their_ends() -> None:
    async with stack(1, settings=ON) as s:
        await ask(s, "2464eb75050f8cad000000000001", "2464eb75050f8cad000000000002")
        async with s.http.post(s.url + CHAT, json={**BODY, "stream": True}, headers={"x-request-id": "s"}) as response:
            await response.read()
        streamed, *whole = [line for line in (await run(s)).output.splitlines() if "complete" in line]
        assert "whole" not in streamed
        assert all(" ms whole " in line or " s whole " in line for line in whole)
        assert [line.split()[2] for line in whole] == ["2464eb75…000000002", "2464eb75…000000001"]
        one = (await run(s, "--last", "--pod", "pod-0")).output
        assert "was: first byte after" in one
        assert "not streamed, so its first byte" in (await run(s, "--id", "2464eb75050f8cad000000000001")).output


async def test_other_weights_show_the_resulting_pod(tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(BODY))
    async with stack(2) as s:
        shown = await run(s, str(file), "--weight", "latency-scorer=3")
        assert shown.exit_code == 0, shown.output
        assert "as configured it would go to pod-" in shown.output
        assert "latency-scorer" in shown.output
        wrong = await run(s, str(file), "--weight", "latency=3")
        assert wrong.exit_code == 2
        assert "did you mean 'latency-scorer'" in wrong.stderr
        assert "The configuration has latency-scorer." in wrong.stderr
        alone = await run(s, str(file), "--profile", "candidate")
        assert (alone.exit_code, alone.stderr) == (2, "There is no profile 'candidate'; there are default.\n")


async def test_a_model_that_no_pod_serves_is_named_as_for_its_client(tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps({**BODY, "model": "other"}))
    async with stack(2) as s:
        shown = await run(s, str(file))
    assert shown.exit_code == 0
    assert (
        "no pod was chosen: The model `other` does not exist; GET /v1/models lists the models that do." in shown.output
    )


async def test_a_body_that_is_neither_json_nor_yaml_is_no_fault_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text('{"model": "sim", "messages": [')
    shown = await run(None, str(file))
    assert (shown.exit_code, shown.stderr.startswith(f"{file}:1:")) == (2, True)


async def test_an_impossible_query_is_exit_code_2_with_the_reason() -> None:
    async with stack(1, settings=ON) as s:
        assert "No decision" in (await run(s, "--id", "nothing")).stderr
        assert "No decision" in (await run(s, "--slow", "2s", "--last")).stderr
        assert (await run(s, "--slow", "fast")).exit_code == 2
    gone = await run(None, "--url", "http://127.0.0.1:1", "--last")
    assert gone.exit_code == 2
    assert "admin port" in gone.stderr


async def test_disabled_recording_explains_how_to_enable_it() -> None:
    async with stack(1) as s:
        shown = await run(s)
        assert shown.exit_code == 0
        assert "telemetry: {decisions: {}}" in shown.output


async def test_the_key_comes_from_the_environment() -> None:
    async with stack(1, settings={**ON, "admin": {"port": 0, "apiKey": "secret"}}) as s:
        refused = await run(s)
        assert refused.exit_code == 2
        assert "KVLANE_ADMIN_KEY" in refused.stderr
        assert (await run(s, KVLANE_ADMIN_KEY="secret")).exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--id", "x"),
        ("--state", "-", "--url", "http://localhost:1"),
        ("--url", "http://localhost:1", "--weight", "a=1"),
        ("--url", "http://localhost:1", "body.json", "--weight", "a"),
    ],
)
async def test_invalid_options_are_refused(arguments: tuple[str, ...]) -> None:
    assert (await run(None, *arguments)).exit_code == 2


async def test_a_pod_or_an_outcome_that_does_not_exist_is_an_error_that_names_the_others() -> None:
    async with stack(2, settings=ON) as s:
        await ask(s, "first")
        pod = await run(s, "--pod", "foo")
        assert (pod.exit_code, pod.stderr) == (2, "There is no pod 'foo'; there are pod-0, pod-1.\n")
        outcome = await run(s, "--outcome", "foo")
        assert outcome.exit_code == 2
        assert "there is no outcome 'foo'; there are in-flight, complete, client-gone, " in outcome.stderr
        idle = await run(s, "--pod", "pod-0", "--outcome", "timed-out")
        assert idle.exit_code == 0, "there is such a pod, without such a request"


async def test_the_default_url_is_that_of_the_other_commands() -> None:
    result = await run(None, "--last", "--key", "k")
    assert "Give either" not in result.stderr
    both = await run(None, "--url", "localhost:1", "--state", "-")
    assert "Give either --url, for a running proxy, or --state, for a file." in both.stderr
