"""The limit on open files: `kvlane serve` raises it, and reports when it is reached without blaming a pod."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.helpers.cli.kvlane import Kvlane, ask, kvlane, until_ready
from tests.helpers.http.support import Pod, Received, answering, plain
from tests.helpers.ports import free_port
from tests.helpers.waiting import until, wait_until

CHAT = b'{"model":"m","messages":[]}'
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
ON_LOOPBACK = ("--host", "127.0.0.1")


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def post(port: int) -> str:
    """Return status and x-kvlane-reason of the response, or the error without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(POST)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        await closed(writer)
    reason = head.partition("x-kvlane-reason: ")[2].partition("\r\n")[0]
    if head.split()[1] == "503":
        assert "retry-after: 1\r\n" in head
    return f"{head.split()[1]} {reason}".rstrip()


async def more_clients_than_descriptors(port: int) -> None:
    """Connect clients that send nothing until one is rejected."""
    clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(130)]
    reads = [asyncio.create_task(reader.read()) for reader, _ in clients]
    await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
    for _, writer in clients:
        await closed(writer)
    await asyncio.gather(*reads, return_exceptions=True)


def limits_of(process: Kvlane) -> tuple[int, int]:
    return resource.prlimit(process.pid, resource.RLIMIT_NOFILE)


async def test_the_soft_limit_is_raised_to_the_hard_limit_and_a_low_hard_limit_is_warned_of() -> None:
    async with Pod(answering(plain())) as pod:
        ports = [*ON_LOOPBACK, "--port", str(free_port()), "--admin-port", "0"]
        with kvlane("serve", "--pod", pod.endpoint.url, *ports, ulimit="-Sn 128 && ulimit -Hn 300") as process:
            await asyncio.to_thread(until_ready, f"http://127.0.0.1:{ports[3]}/health", process)
            assert limits_of(process) == (300, 300)
            process.signal(signal.SIGINT)
            assert await asyncio.to_thread(process.ended) == 0
    line = next(line for line in process.errors.splitlines() if "the limit on open files" in line)
    assert "the limit on open files is 300, too low for listen.maxConnections (20000)" in line
    assert " INFO " in line


def test_a_configured_limit_of_connections_beyond_the_open_files_is_a_warning(tmp_path: Path) -> None:
    file, port = tmp_path / "kvlane.yaml", free_port()
    listen = f"{{host: 127.0.0.1, port: {port}, maxConnections: 150}}"
    file.write_text(f"listen: {listen}\nadmin: {{port: 0}}\npods: {{static: [{{url: http://127.0.0.1:1}}]}}")
    with kvlane("serve", "-c", str(file), ulimit="-n 300") as process:
        wait_until(lambda: ask(f"http://127.0.0.1:{port}/health")[0] != 0)
        process.signal(signal.SIGINT)
        assert process.ended() == 0
    line = next(line for line in process.errors.splitlines() if "the limit on open files" in line)
    assert " WARNING " in line


async def test_without_free_descriptors_clients_get_503_and_no_pod_is_ejected() -> None:
    done = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        if request.line.startswith(b"POST"):
            await done.wait()
        await request.send(plain())

    async with Pod(script) as pod:
        port, admin = free_port(), free_port()
        ports = [*ON_LOOPBACK, "--port", str(port), "--admin-port", str(admin)]
        with kvlane("serve", "--pod", pod.endpoint.url, *ports, ulimit="-n 128") as process:
            await asyncio.to_thread(until_ready, f"http://127.0.0.1:{port}/health", process)
            await more_clients_than_descriptors(port)
            running = [asyncio.create_task(post(port)) for _ in range(150)]
            await until(lambda: any(task.done() and task.result() == "503 out-of-files" for task in running))
            done.set()
            results = Counter(await asyncio.gather(*running))
            assert results.keys() <= {"200", "503 out-of-files", "closed"}, results
            assert await post(port) == "200"  # no pod is ejected
            _, pods = await asyncio.to_thread(ask, f"http://127.0.0.1:{admin}/admin/pods")
            assert [each["doubts"] for each in json.loads(pods)["pods"]] == [[]]
            _, metrics = await asyncio.to_thread(ask, f"http://127.0.0.1:{admin}/metrics")
            for operation in ("connect", "accept"):
                sample = f'kvlane_open_files_limit_reached_total{{operation="{operation}"}} '
                assert float(metrics.decode().partition(sample)[2].split()[0]) > 0
            process.signal(signal.SIGINT)
            assert await asyncio.to_thread(process.ended) == 0
    assert process.errors.count("out of file descriptors: the limit on open files is 128") == 1
    assert "takes no connections" not in process.errors
