"""Which header fields pass, both ways."""

from __future__ import annotations

from proxy.core.endpoint import Endpoint
from tests.helpers.http.support import CHAT, Pod, answering, plain, post, rig


async def seen_by_pod(
    *headers: str, api_key: str | None = None, added: tuple[tuple[str, str], ...] = ()
) -> list[bytes]:
    """The request head as the pod got it, line by line."""
    async with Pod(answering(plain())) as pod:
        endpoint = Endpoint("p", pod.endpoint.url, api_key=api_key)
        async with rig(endpoint) as port:
            port.gateway.upstream_headers += added
            await port.ask(post(CHAT, b"{}", *headers))
        request = pod.requests[0]
        return [request.line, *(name + b": " + value for name, value in request.headers)]


async def test_end_to_end_headers_pass_in_order_and_spelling_with_duplicates() -> None:
    ours = ["X-B: 1", "x-a: 2", "Cookie: a=1", "X-B: 3", "Cookie: b=2", "traceparent: 00-ab", "User-Agent: curl"]
    lines = await seen_by_pod(*ours)
    assert [line.decode() for line in lines if line.decode() in ours] == ours


async def test_bytes_of_values_are_unchanged() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await port.ask(post(CHAT, b"{}", "x-odd: PLACE").replace(b"PLACE", b"caf\xe9 \xf0\x9f\x98\x80"))
        assert pod.requests[0].all(b"x-odd") == [b"caf\xe9 \xf0\x9f\x98\x80"]


async def test_hop_by_hop_headers_are_removed() -> None:
    lines = await seen_by_pod(
        "Connection: keep-alive, X-Private",
        "X-Private: 1",
        "Keep-Alive: timeout=5",
        "Proxy-Authorization: Basic eA==",
        "Proxy-Connection: keep-alive",
        "TE: trailers",
        "Trailer: x",
        "Expect: 100-continue",
    )
    names = [line.partition(b":")[0].lower() for line in lines[1:]]
    assert sorted(names) == [b"content-length", b"host", b"x-request-id"]


async def test_the_connection_header_cannot_remove_required_headers() -> None:
    lines = await seen_by_pod("Connection: content-type, host, x-request-id", "Content-Type: application/json")
    assert b"Content-Type: application/json" in lines
    assert sum(line.lower().startswith(b"x-request-id:") for line in lines) == 1
    assert sum(line.lower().startswith(b"host:") for line in lines) == 1


async def test_headers_that_steer_engines_or_kvlane_are_removed() -> None:
    inner = (
        "x-kvlane-endpoint",
        "X-Kvlane-Anything",
        "x-prefiller-host-port",
        "x-encoder-hosts-ports",
        "x-data-parallel-host-port",
        "X-Data-Parallel-Rank",
        "x-kv-cache-source-host-port",
        "X-Gateway-Destination-Endpoint",
        "x-gateway-destination-endpoint-served",
    )
    lines = await seen_by_pod(*(f"{name}: evil" for name in inner))
    assert not [line for line in lines if b"evil" in line]


async def test_the_host_is_the_pod() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await port.ask(post())
        assert pod.requests[0].all(b"host") == [pod.endpoint.url.removeprefix("http://").encode()]


async def test_hooks_add_headers_for_the_pod_and_cannot_break_lines() -> None:
    lines = await seen_by_pod(added=(("x-prefiller-host-port", "10.0.0.1:80"), ("x-odd", "a\r\nevil: 1")))
    assert b"x-prefiller-host-port: 10.0.0.1:80" in lines
    assert b"x-odd: a  evil: 1" in lines


async def test_exactly_one_authorization_is_sent() -> None:
    given = ("Authorization: Bearer mine", "authorization: Bearer second")
    own = [line for line in await seen_by_pod(*given) if line.lower().startswith(b"authorization")]
    assert own == [b"Authorization: Bearer mine"]
    replaced = [line for line in await seen_by_pod(*given, api_key="pod") if line.lower().startswith(b"authorization")]
    assert replaced == [b"authorization: Bearer pod"]
    alone = [line for line in await seen_by_pod(api_key="pod") if line.lower().startswith(b"authorization")]
    assert alone == [b"authorization: Bearer pod"]


async def test_a_request_id_is_kept_or_generated_and_equal_on_both_sides() -> None:
    async with Pod(answering(plain(extra=b"x-request-id: the-pods\r\n"))) as pod, rig(pod) as port:
        given = await port.ask(post(CHAT, b"{}", "X-Request-Id: mine", "x-request-id: another"))
        made = await port.ask(post())
        other = await port.ask(post())
        assert given.all("x-request-id") == ["mine"]
        assert pod.requests[0].all(b"x-request-id") == [b"mine"]
        assert [value.encode() for value in made.all("x-request-id")] == pod.requests[1].all(b"x-request-id")
        assert made.all("x-request-id") != other.all("x-request-id")


async def test_path_and_query_are_sent_unchanged() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await port.ask(post(CHAT + "?a=%2F%zz&b=c+d&&e"))
        assert pod.requests[0].line == f"POST {CHAT}?a=%2F%zz&b=c+d&&e HTTP/1.1".encode()
        assert port.gateway.calls[0].path == CHAT


async def test_an_absolute_target_is_sent_without_its_authority() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        seen = await port.ask(post("http://kvlane.example" + CHAT + "?q"))
        assert seen.status == 200
        assert pod.requests[0].line == f"POST {CHAT}?q HTTP/1.1".encode()


async def test_the_path_of_a_pods_url_precedes_every_path() -> None:
    async with Pod(answering(plain())) as pod, rig(Endpoint("p", pod.endpoint.url + "/engine/")) as port:
        await port.ask(post())
        assert pod.requests[0].line == f"POST /engine{CHAT} HTTP/1.1".encode()


async def test_responses_keep_their_headers_except_hop_by_hop_ones() -> None:
    fields = [
        "Set-Cookie: a=1",
        "X-Mixed-Case: Yes",
        "set-cookie: b=2",
        "Server: uvicorn",
    ]
    hop = "Connection: keep-alive, X-Gone\r\nX-Gone: 1\r\nKeep-Alive: timeout=5\r\nx-kvlane-endpoint: forged\r\n"
    extra = "\r\n".join((*fields, hop)).encode()
    async with Pod(answering(plain(extra=extra))) as pod, rig(pod) as port:
        port.gateway.response_headers.append(("x-kvlane-endpoint", "pod-0"))
        seen = await port.ask(post())
    lines = seen.raw.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert [line for line in lines if line in fields] == fields
    assert seen.all("x-gone") == []
    assert seen.all("keep-alive") == []
    assert seen.all("x-kvlane-endpoint") == ["pod-0"]
    assert seen.all("connection") == ["close"]


async def test_long_headers_pass() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        seen = await port.ask(post(CHAT, b"{}", "x-long: " + "a" * 60_000))
        assert seen.status == 200
        assert pod.requests[0].all(b"x-long") == [b"a" * 60_000]
