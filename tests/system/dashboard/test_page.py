from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest

from proxy.core.endpoint import EndpointState
from proxy.fleet.settings import DataParallelSettings, PodSettings
from proxy.lab.sim import SimConfig
from tests.helpers.dashboard.browser import ENTER, ESCAPE, TAB, Page, chromium, needs_axe, needs_chromium
from tests.helpers.dashboard.scene import Scene, scene
from tests.helpers.scenarios.stack import stack
from tests.helpers.waiting import until

pytestmark = needs_chromium

TILES = "document.querySelectorAll('#pods .tile')"
FULL = {
    "telemetry": {"accessLog": False, "decisions": {"keep": 100}},
    "flowControl": {"maxConcurrentPerPod": 50},
    "autoscale": {"pools": {"default": {"roles": [{"name": "vllm", "min": 2, "max": 2}]}}},
    "scheduling": {
        "plugins": [
            {"type": "approx-prefix-cache-producer"},
            {"type": "prefix-cache-scorer"},
            {"type": "queue-scorer"},
            {"type": "random-picker"},
            {"type": "max-score-picker"},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [
                    {"pluginRef": "prefix-cache-scorer", "weight": 3},
                    {"pluginRef": "queue-scorer"},
                    {"pluginRef": "max-score-picker"},
                ],
            },
            {"name": "chance", "shadow": True, "plugins": [{"pluginRef": "random-picker"}]},
        ],
    },
}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as driver:
        yield Page(driver)


def tile(pod: str) -> str:
    return f"[data-key=pod-{pod}]"


async def test_the_fleet_is_shown_and_updated(page: Page) -> None:
    async with scene(pods=3) as made:
        await page.open(f"{made.url}/dashboard")
        await page.until(f"{TILES}.length === 3")
        await page.says("#attention-title", "All is well: 3 pods ready")
        await page.says("#connection", "live")
        endpoint = made.fleet.get("vllm-1")
        assert endpoint is not None
        endpoint.charge(42, 0)
        await page.says(f"{tile('vllm-1')} .number", "42")
        made.add("vllm-3")
        await page.until(f"{TILES}.length === 4")
        made.fleet.remove("vllm-0")
        await page.until(f"{TILES}.length === 3")
        assert await page.complaints() == []


async def test_findings_are_listed_first_with_their_reason(page: Page) -> None:
    async with scene(pods=6) as made:
        ill, broken = made.fleet.get("vllm-4"), made.fleet.get("vllm-5")
        assert ill is not None
        assert broken is not None
        made.fleet.eject(ill, "makes no progress")
        made.breakers[broken] = "open"
        await page.open(f"{made.url}/dashboard")
        await page.says("#attention-title", "2 things to look at")
        await page.says("#findings", "vllm-4 gets no requests: makes no progress")
        await page.says("#findings", "vllm-5 breaker open")
        assert await page.ask(f"[...{TILES}].slice(0, 2).map(one => one.dataset.key)") == ["pod-vllm-4", "pod-vllm-5"]
        label = await page.ask(f"document.querySelector('{tile('vllm-4')}').textContent")
        assert "ejected" in label
        assert "makes no progress" in label
        made.fleet.uneject(ill, "makes no progress")
        del made.breakers[broken]
        await page.says("#attention-title", "All is well")


async def test_five_hundred_pods_are_filtered_sorted_and_listed(page: Page) -> None:
    async with scene(pods=500) as made:
        ill = made.fleet.get("vllm-321")
        assert ill is not None
        made.fleet.eject(ill, "makes no progress")
        await page.open(f"{made.url}/dashboard")
        await page.until(f"{TILES}.length === 500")
        assert await page.ask("document.querySelector('#pods').dataset.size") == "dense"
        await page.click("#findings button")
        await page.until(f"{TILES}.length === 1")
        await page.says("#fleet-count", "1 of 500 pods")
        await page.write("#fleet-filter", "vllm-49")
        await page.until(f"{TILES}.length === 11")
        await page.click("#fleet-list")
        await page.until("document.querySelectorAll('#pods tbody tr').length === 11")
        await page.ask(
            "[...document.querySelectorAll('#pods th button')].find(one => one.innerText === 'KV use').click()"
        )
        used = await page.ask(
            "[...document.querySelectorAll('#pods tbody tr')].map(row => parseFloat(row.cells[5].innerText))"
        )
        assert used == sorted(used, reverse=True)
        assert await page.ask("document.querySelector('#pods th[aria-sort=descending]').innerText") == "KV use"


async def test_a_pod_sums_its_ranks_and_opens_into_them(page: Page) -> None:
    async with scene(pods=1) as made:
        pod = made.fleet.add(PodSettings("http://moe:8000", "moe", data_parallel=DataParallelSettings(4)))
        for rank, endpoint in enumerate(pod.ranks):
            made.report(endpoint, waiting=rank, kv_usage=0.2 * rank + 0.38)
            endpoint.charge(rank + 1, 0)
        made.fleet.reached(pod)
        await page.open(f"{made.url}/dashboard")
        await page.until(f"{TILES}.length === 2")
        await page.says("#fleet-count", "2 pods")
        await page.says(f"{tile('moe')} .number", "10")
        await page.says(f"{tile('moe')} .waiting", "+15 queued")
        await page.says(f"{tile('moe')} .role", "4 ranks")
        await page.says("#findings", "moe rank 3: KV cache 98 % full")
        await page.click(tile("moe"))
        await page.says("#dialog", "http://moe:8000")
        names = "[...document.querySelectorAll('#dialog [data-key^=rank-]')].map(one => one.innerText)"
        assert await page.ask(names) == [f"moe/{rank}" for rank in range(4)]
        await page.click("[data-key=drain]")
        await page.says("#findings", "moe drains")
        await page.click("[data-key='rank-moe/2']")
        await page.says("#dialog-title", "moe/2")
        await page.says("[data-key=drain]", "Take it back")
        await page.click("[data-key=drain]")
        await page.press(ESCAPE)
        await page.says("#fleet-legend", "")
        await page.click("#fleet-list")
        listed = "[...document.querySelectorAll('#pods tbody tr')].map(row => row.cells[0].innerText)"
        await page.until(f"{listed}.length === 2")
        await page.click("[data-key=ranks-moe]")
        await page.until(f"{listed}.length === 6")
        names = await page.ask(listed)
        assert [name.lstrip("▾").strip() for name in names] == ["moe", "moe/0", "moe/1", "moe/2", "moe/3", "vllm-0"]
        assert await page.ask("document.querySelector('[data-key=ranks-moe]').ariaExpanded") == "true"
        await page.write("#fleet-filter", "moe/3")
        await page.until(f"{listed}.length === 5")
        await page.click("[data-key=ranks-moe]")
        await page.until(f"{listed}.length === 1")
        assert await page.complaints() == []


async def test_ranks_with_a_port_each_are_one_pod_and_are_drained_together(page: Page) -> None:
    async with scene() as made:
        settings = PodSettings("http://node-1", "node-1", ports="8000-8002")
        endpoints = [made.fleet.add(one) for one in settings.expanded()]
        for endpoint in endpoints:
            made.report(endpoint)
            made.fleet.reached(endpoint)
        made.fleet.eject(endpoints[1], "makes no progress")
        await page.open(f"{made.url}/dashboard")
        await page.says("#fleet-count", "1 pod")
        await page.says("#findings", "node-1 rank 1: gets no requests: makes no progress")
        await page.says("#figures", "1 / 1")
        await page.click(tile("node-1"))
        await page.says("#dialog", "http://node-1:8000")
        await page.click("[data-key=drain]")
        await until(lambda: {state_of(made, one.name) for one in endpoints} == {EndpointState.DRAINING})
        await page.says("[data-key=drain]", "Take it back")


async def test_percentiles_are_drawn_and_described(page: Page) -> None:
    async with scene(pods=1) as made:
        await page.open(f"{made.url}/dashboard")
        await page.until("document.querySelector('#trends svg[role=img]')")
        for _ in range(2):
            made.reply(0.3, number=20)
            made.reply(7.0, number=1)
            await page.until("document.querySelector('#trends .path.line-0').getAttribute('d')")
        label = "document.querySelector('#trends svg[role=img]').getAttribute('aria-label')"
        await page.until(f"/Time to first token: p50 \\d+ ms, p90/.test({label})")


async def test_tokens_and_cache_hits_are_shown_with_their_source(page: Page) -> None:
    async with scene() as made:
        pod = made.add("vllm-0", prompt_tokens=0.0, generation_tokens=0.0)
        await page.open(f"{made.url}/dashboard")
        await page.says("#figures", "no data")
        for round_of in range(1, 1000):
            totals = {"prompt_tokens": 900.0 * round_of, "prefix_queries": 900.0 * round_of}
            made.report(pod, generation_tokens=300.0 * round_of, prefix_hits=225.0 * round_of, **totals)
            if "from pods" in await page.text("#figures"):
                break
            await asyncio.sleep(0.05)
        figures = await page.text("#figures")
        assert re.search(r"Tokens out\s+[1-9].* /s\s+in .+ /s\s+from pods", figures)
        assert re.search(r"Cache hits\s+25 ?%\s+expected \S+\s+from pods", figures)


@pytest.mark.smoke
async def test_a_pod_is_drained_and_undrained(page: Page) -> None:
    async with scene(pods=2) as made:
        await page.open(f"{made.url}/dashboard")
        await page.until(f"{TILES}.length === 2")
        await page.click(tile("vllm-0"))
        await page.says("#dialog", "http://vllm-0:8000")
        await page.click("[data-key=drain]")
        await until(lambda: state_of(made, "vllm-0") is EndpointState.DRAINING)
        await page.says("[data-key=drain]", "Take it back")
        await page.says("#findings", "vllm-0 drains")
        await page.click("[data-key=drain]")
        await until(lambda: state_of(made, "vllm-0") is not EndpointState.DRAINING)
        await page.press(ESCAPE)
        await page.until("!document.querySelector('#dialog').open")


def state_of(made: Scene, name: str) -> EndpointState:
    endpoint = made.fleet.get(name)
    assert endpoint is not None
    return endpoint.state


async def test_a_key_is_requested_if_one_is_needed_and_kept_nowhere(page: Page) -> None:
    async with scene(pods=2, api_key="s3cret") as made:
        await page.open(f"{made.url}/dashboard")
        await page.until("document.querySelector('#key-dialog').open")
        await page.write("#key", "wrong")
        await page.press(ENTER)
        await page.says("#key-why", "not accepted")
        await page.write("#key", "s3cret")
        await page.press(ENTER)
        await page.until(f"{TILES}.length === 2")
        await page.click(tile("vllm-1"))
        await page.until("document.querySelector('[data-key=drain]')")
        await page.click("[data-key=drain]")
        await until(lambda: state_of(made, "vllm-1") is EndpointState.DRAINING)
        kept = await page.ask(
            "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])"
        )
        assert "s3cret" not in kept
        await page.open(f"{made.url}/dashboard")
        await page.until("document.querySelector('#key-dialog').open")


async def test_the_closed_key_dialog_can_be_reopened(page: Page) -> None:
    async with scene(pods=2, api_key="s3cret") as made:
        await page.open(f"{made.url}/dashboard")
        await page.until("document.querySelector('#key-dialog').open")
        await page.press(ESCAPE)
        await page.says("#attention-title", "without the admin key")
        await page.says("#connection", "no key")
        await page.click("#enter-key")
        await page.write("#key", "s3cret")
        await page.press(ENTER)
        await page.says("#attention-title", "All is well: 2 pods ready")
        await page.until("!document.querySelector('#enter-key')")


async def test_a_pod_that_never_responds_is_a_finding(page: Page) -> None:
    async with scene(pods=1) as made:
        made.fleet.add(PodSettings(url="http://vllm-9:8000", name="vllm-9"))
        await page.open(f"{made.url}/dashboard")
        await page.says("#findings", "vllm-9 has not responded yet")
        await page.says("#attention-title", "All is well")
        await page.says("#findings", "vllm-9 has never responded: kvlane doctor")
        await page.says("#attention-title", "1 thing to look at")


async def test_a_pod_that_refused_connections_before_the_page_was_opened_is_a_finding_at_once(page: Page) -> None:
    async with scene(pods=1) as made:
        lost = made.fleet.add(PodSettings(url="http://vllm-9:8000", name="vllm-9"))
        made.fleet.missed(lost, "connection refused")
        await asyncio.sleep(6)  # longer than a pod that is well starts
        await page.open(f"{made.url}/dashboard")
        await page.says("#attention-title", "1 thing to look at")
        await page.says("#findings", "vllm-9 has never responded")
        assert "connection refused for" in await page.ask("document.querySelector('#findings').innerText")


async def test_an_empty_fleet_explains_how_to_add_a_pod(page: Page) -> None:
    async with scene() as made:
        await page.open(f"{made.url}/dashboard")
        await page.says("#fleet-legend", "POST /admin/pods")
        made.add("vllm-0")
        await page.until("!document.querySelector('#fleet-legend').innerText")
        await page.write("#fleet-filter", "nobody")
        await page.says("#fleet-legend", "No pod is like that.")


async def test_the_keyboard_reaches_everything(page: Page) -> None:
    async with scene(pods=2) as made:
        await page.open(f"{made.url}/dashboard")
        await page.until(f"{TILES}.length === 2")
        await page.press(TAB)
        assert await page.focus() == "To the pods"
        await page.press(ENTER)
        for _ in range(12):
            await page.press(TAB)
            if (await page.focus()).startswith("vllm-0"):
                break
        assert "ready" in await page.focus()
        await page.press(ENTER)
        await page.until("document.querySelector('#dialog').open")
        await page.says("#dialog", "http://vllm-0:8000")
        for _ in range(4):
            if "Drain" in await page.focus():
                break
            await page.press(TAB)
        await page.press(ENTER)
        await page.says("[data-key=drain]", "Take it back")
        assert await page.focus() == "Take it back", "the focus stays where it was while the dialog is drawn again"
        await page.press(ESCAPE)
        await page.until("!document.querySelector('#dialog').open")
        assert (await page.focus()).startswith("vllm-0"), "the focus goes back to where it came from"


async def test_a_lost_connection_is_shown_and_comes_back(page: Page) -> None:
    async with scene(pods=1) as made:
        await page.open(f"{made.url}/dashboard")
        await page.says("#connection", "live")
    await page.says("#connection", "connection lost")


async def test_live_requests_decisions_and_a_dry_run(page: Page) -> None:
    async with stack(2, SimConfig(time_scale=20), settings=FULL) as proxy:
        await page.open(f"{proxy.admin}/dashboard")
        await page.until(f"{TILES}.length === 2")
        for number in range(6):
            response, _ = await proxy.chat("a document that all of them are about. " * 40 + str(number))
            assert response.status == 200
        await page.ask("document.querySelector('#decisions').scrollIntoView()")
        await page.until("document.querySelectorAll('#decision-list tbody tr').length === 6")
        await page.click("#decision-list tbody button")
        await page.says("#dialog", "prefix-cache-scorer × 75 %")
        await page.says("#dialog tr.chosen", "chosen")
        await page.says("#dialog", "Profile chance (shadow: only counted)")
        await page.press(ESCAPE)
        await page.says("#shadow-list", "chance")
        await page.until("document.querySelector('#heat td.hot')")
        await page.says("#queue-list", "Waiting")
        await page.click("#edit summary")
        await page.until("document.querySelector('#editor').value.includes('weight: 3')")
        edited = "document.querySelector('#editor')"
        await page.ask(f"{edited}.value = {edited}.value.replace('weight: 3', 'weight: nine')")
        await page.click("#try")
        await page.says("#configuration-body", "1 fault; nothing has changed.")
        await page.ask(f"{edited}.value = {edited}.value.replace('weight: nine', 'weight: 9')")
        await page.click("#try")
        await page.says("#configuration-body .diff", "weight: 9")
        assert proxy.app.configurations.described()["number"] == 1
        await page.ask("[...document.querySelectorAll('#edit button')].find(one => one.innerText === 'Apply').click()")
        await page.says("#configuration-version", "version 2")


@needs_axe
@pytest.mark.parametrize(("pods", "scheme", "width"), [(4, "light", 1400), (60, "dark", 1400), (200, "light", 390)])
async def test_axe_finds_no_serious_issue(page: Page, pods: int, scheme: str, width: int) -> None:
    async with scene(pods=pods) as made:
        ill, broken = made.fleet.get("vllm-2"), made.fleet.get("vllm-3")
        assert ill is not None
        assert broken is not None
        made.fleet.eject(ill, "makes no progress")
        made.fleet.drain("vllm-1")
        made.breakers[broken] = "half-open"
        made.fleet.add(PodSettings("http://moe:8000", "moe", data_parallel=DataParallelSettings(4)))
        await page.open(f"{made.url}/dashboard", {"prefers-color-scheme": scheme}, width)
        await page.until(f"{TILES}.length === {pods + 1}")
        await page.says("#findings", "vllm-2 gets no requests")
        assert await page.violations() == []
        await page.click("#fleet-list")
        await page.click("[data-key=ranks-moe]")
        await page.click("#pods tbody button")
        await page.until("document.querySelector('#dialog').open")
        assert await page.violations() == []
        wider = await page.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, "nothing hangs over the edge of the screen"


HOSTILE = "<img src=x onerror=window.stolen=1> <script>window.stolen=1</script> <svg onload=window.stolen=1>"
QUOTED = "\"' onmouseover=window.stolen=1 autofocus onfocus=window.stolen=1 x='"


async def assert_nothing_is_markup(page: Page) -> None:
    """No element was made of the texts, no script ran, and the security policy had none to stop."""
    made = "img:not([src^='/dashboard/assets/']), svg[onload], [onerror], [onmouseover], [onfocus], body script"
    assert await page.ask("[...document.querySelectorAll(arguments[0])].map(one => one.outerHTML)", made) == []
    assert await page.ask("window.stolen ?? null") is None
    assert await page.complaints() == []


async def test_markup_in_what_pods_say_is_text(page: Page) -> None:
    async with scene() as made:
        for number, text in enumerate((HOSTILE, QUOTED)):
            settings = PodSettings(f"http://vllm-{number}:8000", text, labels={"zone": text}, models=(text,))
            pod = made.fleet.add(settings)
            made.report(pod, running=1, active_models=frozenset((text,)))
            made.fleet.reached(pod)
        ejected = made.fleet.get(HOSTILE)
        assert ejected is not None
        made.fleet.eject(ejected, f"reason {HOSTILE} {QUOTED}")
        await page.open(f"{made.url}/dashboard")
        await page.until(f"{TILES}.length === 2")
        await page.says("#findings", f"reason {HOSTILE} {QUOTED}")
        for text in (HOSTILE, QUOTED):
            await page.ask(f"[...{TILES}].find(one => one.dataset.key === arguments[0]).click()", f"pod-{text}")
            await page.says("#dialog-title", text)
            await assert_nothing_is_markup(page)
            await page.press(ESCAPE)
        await page.click("#fleet-list")
        await page.until("document.querySelectorAll('#pods tbody tr').length === 2")
        await page.write("#fleet-filter", HOSTILE)
        await page.until("document.querySelectorAll('#pods tbody tr').length === 1")
        await assert_nothing_is_markup(page)


async def test_markup_in_what_clients_and_operators_send_is_text(page: Page) -> None:
    async with stack(1, SimConfig(time_scale=20), settings=FULL, each=[{"name": HOSTILE}]) as proxy:
        for model, status in (("sim", 200), (HOSTILE, 404), (QUOTED, 404)):
            body = {"model": model, "messages": [{"role": "user", "content": HOSTILE}], "user": HOSTILE}
            headers = {"x-request-id": f"{QUOTED} {HOSTILE}", "x-llm-d-inference-fairness-id": HOSTILE}
            async with proxy.http.post(f"{proxy.url}/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == status
        await page.open(f"{proxy.admin}/dashboard")
        await page.until(f"{TILES}.length === 1")
        await page.ask("document.querySelector('#decisions').scrollIntoView()")
        await page.until("document.querySelector('#decision-list tbody button')")
        await page.click("#decision-list tbody button")
        await page.says("#dialog", HOSTILE)
        await assert_nothing_is_markup(page)
        await page.press(ESCAPE)
        await page.click("#edit summary")
        await page.until("document.querySelector('#editor').value.includes('weight: 3')")
        edited = "document.querySelector('#editor')"
        await page.ask(f"{edited}.value = {edited}.value.replace('weight: 3', 'weight: ' + arguments[0])", HOSTILE)
        await page.click("#try")
        await page.says("#configuration-body", "1 fault; nothing has changed.")
        await assert_nothing_is_markup(page)
