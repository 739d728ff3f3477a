"""Text that is read again while the proxy runs: the configuration, pods, keys, and objects of a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from bench.fuzzing.inputs import Check
from bench.fuzzing.talk import PATIENCE, read_request
from proxy import yaml_source
from proxy.auth.authenticator import authenticator_of
from proxy.auth.settings import AuthSettings
from proxy.core.errors import ConfigError
from proxy.core.ports import SystemClock
from proxy.core.state import State
from proxy.fleet.discovery.file import FileSource
from proxy.fleet.discovery.kubernetes import KubernetesSource
from proxy.fleet.settings import KubernetesSettings
from proxy.models.cluster import ClusterNames
from proxy.models.settings import ClusterObjects, ModelSettings
from proxy.settings import from_mapping
from tests.helpers.waiting import until


@asynccontextmanager
async def yaml() -> AsyncIterator[Check]:
    async def check(data: bytes, rng: random.Random) -> str:
        before = time.perf_counter()
        try:
            values = yaml_source.read(data.decode("utf-8", "replace"), "fuzz", {"X": "1"})
            if isinstance(values, dict):
                from_mapping(values)
        except ConfigError:
            pass
        return _slow(before)

    yield check


@asynccontextmanager
async def discovery() -> AsyncIterator[Check]:
    """Each input is a file of pods and a key file."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "file"

        async def check(data: bytes, rng: random.Random) -> str:
            before = time.perf_counter()
            file.write_bytes(data)
            await FileSource(str(file)).poll()
            with suppress(ConfigError):
                authenticator_of(
                    AuthSettings(api_keys_file=str(file)), SystemClock(), {"X": "1"}, _nothing, State().draft()
                )
            return _slow(before)

        yield check


@asynccontextmanager
async def cluster() -> AsyncIterator[Check]:
    """The first line of an input is the API server's list, the rest are the events of a watch."""
    listed, events, requests = b"", b"", 0

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        try:
            line, _, _ = await read_request(reader)
            requests += 1
            body = events if b"watch=true" in line else listed
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        settings = ClusterObjects(server=url, namespace="n")
        pods = KubernetesSettings(server=url, namespace="n", selector="app=vllm", service="s")
        pool = KubernetesSettings(server=url, namespace="n", inference_pool="p")

        async def check(data: bytes, rng: random.Random) -> str:
            nonlocal listed, events, requests
            listed, _, events = data.partition(b"\n")
            requests = 0
            async with (
                ClusterNames(settings, SystemClock(), rng, retry=0.001) as names,
                KubernetesSource(pods, SystemClock(), rng, retry=0.001) as of_service,
                KubernetesSource(pool, SystemClock(), rng, retry=0.001) as of_pool,
            ):
                await until(lambda: requests >= 10, PATIENCE)
                names.added_to(ModelSettings())
                for source in (of_service, of_pool):
                    if source._news.is_set():
                        await source.poll()
            return ""

        yield check


async def _nothing(url: str) -> tuple[int, bytes]:
    return 404, b""


def _slow(before: float) -> str:
    took = time.perf_counter() - before
    return f"took {took:.1f} s" if took > PATIENCE else ""
