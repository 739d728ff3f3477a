from __future__ import annotations

import asyncio

from tests.dashboard.scene import events
from tests.workers.host import host


async def test_the_host_shows_what_all_workers_do() -> None:
    async with host(workers=2) as served:
        url = f"http://127.0.0.1:{served.supervisor.admin_port}/dashboard/events"
        async with served.admin_http.get(url) as answer, asyncio.timeout(60):
            shown = events(answer)
            _, first = await anext(shown)
            assert set(first["pods"]) == {"pod-0", "pod-1"}
            assert first["about"]["workers"] == 2
            assert first["queues"] is None
            for number in range(6):
                await served.chat(f"question {number}")
            answered = 0.0
            async for _, change in shown:
                point = change.get("point") or {"good": 0, "seconds": 0}
                answered += point["good"] * point["seconds"]
                if round(answered) == 6:
                    break
