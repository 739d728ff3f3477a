"""Bodies of records that other processes send are read into typed values, or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy.cluster import messages as bodies
from proxy.cluster.messages import Garbled
from proxy.cluster.shared import entries


@pytest.mark.parametrize(
    ("read", "body", "value"),
    [
        (bodies.breaker, b'["p",true]', ("p", True)),
        (bodies.pod, b"p", "p"),
        (bodies.bindings, b'[["resp_1","p"]]', [("resp_1", "p")]),
        (bodies.doubts, b'{"p":["x"]}', {"p": ["x"]}),
        (bodies.reloaded, b"[1,false]", (1, False)),
        (bodies.number, b"3", 3),
        (bodies.numbers, b"[[0,3],[1,4]]", {0: 3, 1: 4}),
        (bodies.hosts, b"[2,1,true]", (2, 1, True)),
        (bodies.snapshot, b'{"to":5,"memory":1.0}', (5, 1.0)),
        (bodies.facts, b'{"name":"n","config":"c","members":[0,1]}', ("n", "c", [0, 1])),
    ],
)
def test_a_body_is_read_into_typed_values(read: Callable[[bytes], object], body: bytes, value: object) -> None:
    assert read(body) == value


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (bodies.breaker, b"["),
        (bodies.breaker, b'[["p"],true]'),
        (bodies.breaker, b'["p"]'),
        (bodies.pod, b"\xff"),
        (bodies.bindings, b"5"),
        (bodies.bindings, b'[["resp_1",["p"]]]'),
        (bodies.doubts, b'{"p":5}'),
        (bodies.doubts, b'["p"]'),
        (bodies.reloaded, b'[1,"yes"]'),
        (bodies.number, b'"3"'),
        (bodies.numbers, b"3"),
        (bodies.numbers, b"[[0]]"),
        (bodies.hosts, b"[0,0,true]"),
        (bodies.hosts, b"[2,2,true]"),
        (bodies.snapshot, b'{"to":4294967296,"memory":1.0}'),
        (bodies.snapshot, b'{"to":5,"memory":-1}'),
        (bodies.facts, b'{"name":"n","config":"c","members":[-1]}'),
        (bodies.facts, b'{"name":"n","config":"c"}'),
    ],
)
def test_a_body_of_another_shape_is_refused(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(Garbled):
        read(body)


@pytest.mark.parametrize("spent", [b'[1,["nan",1,1,1,1]]', b"[1,[1e308,1e308,1,1,1]]", b"[-1,[1,1,1,1,1]]"])
def test_limits_that_no_process_can_have_spent_are_refused(spent: bytes) -> None:
    running, amounts = spent[1:-1].split(b",", 1)
    with pytest.raises(Garbled):
        list(entries(b'[[["key","team","default"],%b,%b]]' % (running, amounts)))
