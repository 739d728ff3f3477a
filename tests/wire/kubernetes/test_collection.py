"""A collection follows the server through all that can happen to a watch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from proxy.core.ports import SystemClock
from proxy.core.tasks import Tasks
from proxy.kubernetes.api import PAGE, Api, Collection, Object, Resource
from proxy.kubernetes.settings import ApiServer
from tests.helpers.cluster.store import Wall
from tests.helpers.kubernetes.server import FakeApiServer, pod, pods_in
from tests.helpers.waiting import until

PODS = Resource("", "v1", "pods")
POOLS = Resource("inference.networking.k8s.io", "v1", "inferencepools")

RETRY = 0.01

ACCESS = ApiServer(namespace="ns")


class Followed(Collection[str]):
    """The uids of objects by name, and how often something was new."""

    def __init__(
        self,
        access: ApiServer,
        resource: Resource = PODS,
        selector: str = "app=vllm",
        read: Callable[[Object], str] | None = None,
        *,
        retry: float = RETRY,
        **limits: float,
    ) -> None:
        self.news = 0
        clock, rng = SystemClock(), random.Random(1)
        query = {"labelSelector": selector}
        api = Api(access, **limits)
        super().__init__(api, resource, query, read or _uid, self._count, clock, rng, retry)

    def _count(self) -> None:
        self.news += 1


def _uid(item: Object) -> str:
    return str(item["metadata"]["uid"])


@asynccontextmanager
async def following(
    server: FakeApiServer, resource: Resource = PODS, access: ApiServer = ACCESS, **limits: Any
) -> AsyncIterator[Followed]:
    followed = Followed(replace(access, server=server.url), resource, **limits)
    async with Tasks() as tasks:
        tasks.start(followed.run(), "watch")
        yield followed


@asynccontextmanager
async def two_pods(**limits: Any) -> AsyncIterator[tuple[FakeApiServer, Followed]]:
    """That are known, and watched."""
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a"))
        server.put(pods_in(), pod("b"))
        async with following(server, **limits) as followed:
            await until(lambda: len(followed.objects) == 2 and server.open)
            yield server, followed


async def test_additions_changes_and_deletions_are_seen_without_another_list() -> None:
    async with two_pods() as (server, followed):
        server.put(pods_in(), pod("c", uid="first"))
        await until(lambda: followed.objects.get("c") == "first")
        server.put(pods_in(), pod("c", uid="second"))
        await until(lambda: followed.objects.get("c") == "second")
        server.delete(pods_in(), "a")
        await until(lambda: set(followed.objects) == {"b", "c"})
        assert len(server.lists) == 1
        assert len(server.watches) == 1


async def test_only_selected_objects_are_seen_and_those_that_lose_the_label_are_deleted() -> None:
    async with two_pods() as (server, followed):
        server.put(pods_in(), pod("other", labels={"app": "web"}))
        server.put(pods_in("elsewhere"), pod("far"))
        server.put(pods_in(), pod("b", labels={"app": "web"}))
        await until(lambda: set(followed.objects) == {"a"})


async def test_an_irrelevant_change_is_not_reported() -> None:
    async with two_pods() as (server, followed):
        news = followed.news
        server.put(pods_in(), pod("a", address="10.9.9.9"))
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert followed.news == news + 1


async def test_a_long_list_comes_in_pages() -> None:
    async with FakeApiServer() as server:
        for number in range(2 * PAGE + 1):
            server.put(pods_in(), pod(f"p{number}"))
        async with following(server) as followed:
            await until(lambda: followed.listed)
            assert len(followed.objects) == 2 * PAGE + 1
            assert len(server.lists) == 3


async def test_a_list_whose_continuation_expired_restarts() -> None:
    async with FakeApiServer() as server:
        for number in range(PAGE + 1):
            server.put(pods_in(), pod(f"p{number}"))
        server.delay = 0.05
        async with following(server) as followed:
            await until(lambda: len(server.lists) == 2)
            server.forget()
            await until(lambda: followed.listed)
            assert len(followed.objects) == PAGE + 1
            assert len(server.lists) == 4


@pytest.mark.parametrize("size", [1, 7])
async def test_events_are_parsed_with_any_chunks(size: int) -> None:
    async with two_pods() as (server, followed):
        server.chunk = size
        server.put(pods_in(), pod("c"))
        server.delete(pods_in(), "a")
        await until(lambda: set(followed.objects) == {"b", "c"})


async def test_an_object_of_a_megabyte_is_parsed() -> None:
    async with two_pods() as (server, followed):
        server.put(pods_in(), pod("c", annotations={"note": "x" * (1 << 20)}))
        await until(lambda: "c" in followed.objects)
        assert len(server.watches) == 1


async def test_a_broken_watch_resumes_at_its_version() -> None:
    async with two_pods() as (server, followed):
        server.sever()
        server.put(pods_in(), pod("c"))
        server.delete(pods_in(), "a")
        await until(lambda: set(followed.objects) == {"b", "c"})
        assert len(server.lists) == 1
        assert server.watches[-1]["resourceVersion"] == server.watches[0]["resourceVersion"]


async def test_a_watch_broken_in_an_event_gets_it_again() -> None:
    async with two_pods() as (server, followed):
        server.say(b'{"type": "ADDED", "object": {"metadata": {"na')
        server.sever()
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)


async def test_a_watch_ended_by_the_server_is_followed_by_the_next() -> None:
    async with two_pods(watch=1.0) as (server, followed):
        await until(lambda: len(server.watches) == 2)
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert len(server.lists) == 1


async def test_a_watch_that_is_silent_too_long_is_replaced() -> None:
    async with FakeApiServer() as server:
        server.mute = server.no_end = True
        async with following(server, watch=1.0, timeout=0.2) as followed:
            await until(lambda: len(server.watches) == 1)
            server.put(pods_in(), pod("a"))
            await until(lambda: len(server.open) == 1 and server.silenced)
            server.mute = False
            await until(lambda: "a" in followed.objects)
            assert len(server.watches) == 2


async def test_a_bookmark_is_the_version_of_the_next_watch() -> None:
    async with two_pods() as (server, followed):
        assert server.watches[0]["allowWatchBookmarks"] == "true"
        server.pass_by(1000)
        server.bookmark()
        await until(lambda: followed._version == str(server.version))
        server.forget()
        server.sever()
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert len(server.lists) == 1
        assert followed.news == 2


@pytest.mark.parametrize("by_status", [False, True])
async def test_after_410_everything_is_listed_again(by_status: bool) -> None:
    async with two_pods() as (server, followed):
        server.gone_by_status = by_status
        server.sever()
        server.put(pods_in(), pod("c"))
        server.delete(pods_in(), "a")
        server.forget()
        await until(lambda: set(followed.objects) == {"b", "c"})
        assert len(server.lists) == 2


async def test_a_410_during_a_watch_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with two_pods() as (server, followed):
        server.fail(410)
        await until(lambda: len(server.lists) == 2 and server.open)
        assert set(followed.objects) == {"a", "b"}
    assert not caplog.records


async def test_a_410_after_a_bookmark_continues_from_the_new_list() -> None:
    async with two_pods() as (server, followed):
        server.pass_by(1000)
        server.bookmark()
        await until(lambda: followed._version == str(server.version))
        bookmarked = server.version
        server.mute = True
        server.put(pods_in(), pod("c"))
        server.delete(pods_in(), "a")
        server.forget()
        await until(lambda: server.silenced == 2)
        server.mute = False
        server.fail(410, "too old resource version")
        await until(lambda: set(followed.objects) == {"b", "c"} and server.open)
        assert len(server.lists) == 2
        assert int(server.watches[-1]["resourceVersion"]) > bookmarked
        server.bookmark()
        server.put(pods_in(), pod("d"))
        await until(lambda: "d" in followed.objects)
        assert len(server.watches) == 2


async def test_a_bookmark_after_410_changes_no_listed_object() -> None:
    async with two_pods() as (server, followed):
        server.fail(410)
        server.bookmark()
        await until(lambda: len(server.lists) == 2 and server.open)
        news = followed.news
        server.bookmark()
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert followed.news == news + 1
        assert set(followed.objects) == {"a", "b", "c"}


async def test_repeated_410_increases_the_delay() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a"))
        server.statuses["watch:pods"] = (410, "too old resource version")
        async with following(server) as followed:
            await until(lambda: followed._failures == 6)
            assert followed._pause() > 10 * RETRY
            assert set(followed.objects) == {"a"}
            del server.statuses["watch:pods"]
            server.put(pods_in(), pod("b"))
            await until(lambda: set(followed.objects) == {"a", "b"})


async def test_objects_of_one_name_in_two_namespaces_are_separate() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in("ns"), pod("a", uid="near"))
        server.put(pods_in("other"), pod("a", uid="far"))
        async with following(server) as near, following(server, access=ApiServer(namespace="other")) as far:
            await until(lambda: near.listed and far.listed and len(server.open) == 2)
            assert (near.objects, far.objects) == ({"a": "near"}, {"a": "far"})
            server.put(pods_in("other"), pod("a", uid="later"))
            await until(lambda: far.objects == {"a": "later"})
            server.delete(pods_in("other"), "a")
            await until(lambda: not far.objects)
            assert near.objects == {"a": "near"}
            assert near.news == 1


async def test_a_watch_behind_a_silent_firewall_is_replaced() -> None:
    """No FIN, no RST: connections stand, and nothing comes through them, not on new ones either."""
    async with FakeApiServer() as server, Wall(int(server.url.rpartition(":")[2])) as wall:
        server.put(pods_in(), pod("a"))
        server.put(pods_in(), pod("b"))
        followed = Followed(replace(ACCESS, server=f"http://127.0.0.1:{wall.port}"), watch=1.0, timeout=0.3)
        async with Tasks() as tasks:
            tasks.start(followed.run(), "watch")
            await until(lambda: len(followed.objects) == 2 and server.open)
            wall.up()
            server.delete(pods_in(), "a")
            server.put(pods_in(), pod("c"))
            await until(lambda: followed._failures > 1)
            assert set(followed.objects) == {"a", "b"}
            wall.down()
            await until(lambda: set(followed.objects) == {"b", "c"})


async def test_an_error_event_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    async with two_pods() as (server, followed):
        server.fail(500, "etcd has lost its leader")
        await until(lambda: len(server.watches) == 2 and server.open)
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert len(server.lists) == 1
    assert "etcd has lost its leader" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": {"kind": "x"}}',
        b'{"type": "ERROR", "object": {"code": "x", "message": 5}}',
    ],
)
async def test_a_malformed_watch_restarts(line: bytes) -> None:
    async with two_pods() as (server, followed):
        server.say(line)
        await until(lambda: len(server.watches) == 2 and server.open)
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)


async def test_unknown_kinds_of_events_are_skipped() -> None:
    async with two_pods() as (server, followed):
        server.say(b'{"type": "RENAMED", "object": {"metadata": {"name": "a", "resourceVersion": "7"}}}')
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert len(server.watches) == 1


async def test_an_unreadable_object_stays_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    async with two_pods() as (server, followed):
        broken = pod("a")
        del broken["metadata"]["uid"]
        server.put(pods_in(), broken)
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
        assert followed.objects["a"] == "uid-of-a"
    assert "failed to read pods a" in caplog.text


async def test_an_object_with_an_unexpected_empty_list_does_not_end_the_watch() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a"))
        followed = Followed(
            replace(ACCESS, server=server.url), read=lambda item: str(item.get("addresses", ["none"])[0])
        )
        async with Tasks() as tasks:
            tasks.start(followed.run(), "watch")
            await until(lambda: set(followed.objects) == {"a"} and server.open)
            server.put(pods_in(), {**pod("a"), "addresses": []})
            server.put(pods_in(), pod("c"))
            await until(lambda: set(followed.objects) == {"a", "c"})


@pytest.mark.parametrize("name", [5, None, [], {}, "", True])
async def test_an_object_whose_name_is_not_a_text_is_skipped_with_one_log_line(
    name: object, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeApiServer() as server:
        for each in "abc":
            server.put(pods_in(), pod(each))
        for each in "ab":
            server.objects[pods_in()][each]["metadata"]["name"] = name
        async with following(server) as followed:
            await until(lambda: followed.listed and server.open)
            server.say(orjson.dumps({"type": "ADDED", "object": {"metadata": {"name": name, "resourceVersion": "9"}}}))
            server.put(pods_in(), pod("d"))
            await until(lambda: set(followed.objects) == {"c", "d"})
            assert (len(server.lists), len(server.watches)) == (1, 1)
    assert caplog.text.count("its metadata.name is") == 1


async def test_an_object_that_stays_unreadable_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with two_pods() as (server, followed):
        broken = pod("a")
        del broken["metadata"]["uid"]
        for _ in range(3):
            server.put(pods_in(), broken)
        server.put(pods_in(), pod("c"))
        await until(lambda: "c" in followed.objects)
    assert caplog.text.count("failed to read pods a") == 1


@pytest.mark.parametrize(
    "listed",
    [
        b'{"metadata": {"resourceVersion": "5"}, "items": 5}',
        b'{"metadata": {"resourceVersion": "5", "continue": ["x"]}, "items": []}',
        b'{"metadata": {"resourceVersion": []}, "items": []}',
        b'{"metadata": null}',
    ],
)
async def test_a_malformed_list_is_requested_again(listed: bytes, caplog: pytest.LogCaptureFixture) -> None:
    requests = 0

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(listed), listed))
        writer.close()

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        followed = Followed(replace(ACCESS, server=url))
        async with Tasks() as tasks:
            tasks.start(followed.run(), "watch")
            await until(lambda: requests == 3)
    assert "is not a list of objects" in caplog.text


async def test_objects_stay_while_the_server_is_unreachable_and_are_corrected_later() -> None:
    async with two_pods() as (server, followed):
        await server.stop_listening()
        server.delete(pods_in(), "a")
        seen = len(server.watches)
        await until(lambda: followed._failures > 4)
        assert set(followed.objects) == {"a", "b"}
        assert len(server.watches) == seen
        await server.listen()
        await until(lambda: set(followed.objects) == {"b"})


async def test_a_missing_server_at_start_is_logged_once_and_found_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeApiServer() as server:
        await server.stop_listening()
        server.put(pods_in(), pod("a"))
        async with following(server) as followed:
            await until(lambda: followed._failures > 3)
            assert (followed.listed, followed.news) == (False, 1)
            await server.listen()
            await until(lambda: set(followed.objects) == {"a"})
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_a_late_response_is_requested_again() -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a"))
        server.delay = 0.4
        async with following(server, timeout=0.1) as followed:
            await until(lambda: len(server.lists) > 1)
            assert not followed.listed
            server.delay = 0.0
            await until(lambda: followed.listed)


async def test_a_missing_watch_permission_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as server:
        server.statuses["inferencepools"] = (403, 'User "system:serviceaccount:ns:kvlane" cannot list resource')
        async with following(server, resource=POOLS) as followed:
            await until(lambda: followed.news)
    assert "system:serviceaccount:ns:kvlane" in caplog.text
    rule = '{apiGroups: ["inference.networking.k8s.io"], resources: ["inferencepools"], verbs: [list, watch]}'
    assert rule in caplog.text


async def test_a_permission_to_list_only_is_named_without_constant_lists(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeApiServer() as server:
        server.put(pods_in(), pod("a"))
        server.statuses["watch:pods"] = (403, "cannot watch")
        async with following(server, retry=0.05) as followed:
            await until(lambda: followed._failures == 3)
            assert len(server.watches) == 3
            assert set(followed.objects) == {"a"}
    assert 'resources: ["pods"]' in caplog.text


async def test_a_token_that_is_replaced_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    async with FakeApiServer() as server:
        server.token = "new"
        server.put(pods_in(), pod("a"))
        async with following(server, access=replace(ACCESS, token_file=str(file))) as followed:
            await until(lambda: followed._failures)
            assert not followed.listed
            file.write_text("new\n")
            await until(lambda: followed.listed)
    assert "the token is not valid" in caplog.text


async def test_an_unknown_kind_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as server:
        server.statuses["inferencepools"] = (404, "the server could not find the requested resource")
        async with following(server, resource=POOLS) as followed:
            await until(lambda: followed.news)
    assert "install its CRDs, version v1" in caplog.text


async def test_without_a_namespace_all_are_watched(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeApiServer() as server, following(server, access=ApiServer()) as followed:
        await until(lambda: followed.news)
    assert "set a namespace" in caplog.text
