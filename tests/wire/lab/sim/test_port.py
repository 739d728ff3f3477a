"""A pod keeps its port while it is down."""

from __future__ import annotations

import asyncio
import socket

import pytest

from proxy.lab.sim import SimConfig, SimPod


async def test_a_killed_pod_refuses_connections_on_its_reserved_port_and_serves_there_again() -> None:
    async with SimPod(SimConfig(time_scale=20)) as pod:
        where = pod.host, pod.port
        await pod.kill()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*where)
        with socket.socket() as other, pytest.raises(OSError):
            other.bind(where)
        await pod.start(*where)
        _, writer = await asyncio.open_connection(*where)
        writer.close()
        assert (pod.host, pod.port) == where


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_stopped_pod_releases_its_port(is_killed: bool) -> None:
    pod = SimPod()
    await pod.start()
    if is_killed:
        await pod.kill()
    await pod.stop()
    with socket.create_server((pod.host, pod.port)):
        pass


async def test_a_pod_started_elsewhere_releases_its_old_port() -> None:
    async with SimPod() as pod:
        before = pod.host, pod.port
        await pod.kill()
        await pod.start()
        with socket.socket() as other:
            other.bind(before)


async def test_a_port_of_another_pod_is_an_error() -> None:
    async with SimPod() as one:
        with pytest.raises(OSError):
            await SimPod().start(port=one.port)
