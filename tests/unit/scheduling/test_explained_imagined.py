"""Explanations of requests that were not sent."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.core.errors import BadRequest
from proxy.dry_run import DryRunQuery, reweighed
from proxy.scheduling.build import build
from proxy.scheduling.document import read
from tests.helpers.scheduling.deciding import SCORED
from tests.helpers.scheduling.situations import REGISTRY, ports, scheduling


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, "/v1/chat/completions"),
        ({"prompt": "x"}, "/v1/completions"),
        ({"input": "x"}, "/v1/responses"),
    ],
)
def test_a_request_is_recognised_by_its_fields(body: dict[str, Any], path: str) -> None:
    query = DryRunQuery.of(body, {"profile": "p"})
    assert (query.path, orjson.loads(query.body), query.profile) == (path, body, "p")
    assert DryRunQuery.of({"request": body, "path": "/v1/messages"}, {}).path == "/v1/messages"


@pytest.mark.parametrize(
    "query",
    [
        [],
        {"model": "m"},
        {"request": {"prompt": "x"}, "wieghts": {}},
        {"request": {"prompt": "x"}, "weights": {"a": "1"}},
        {"request": {"prompt": "x"}, "weights": {"a": -1}},
        {"request": {"prompt": "x"}, "weights": [1]},
        {"request": {"prompt": orjson.loads(b"[" * 500 + b"]" * 500)}},
        {"request": {"prompt": "x"}, "headers": {"a": 1}},
        {"request": {"prompt": "x"}, "pool": 1},
    ],
)
def test_an_invalid_body_is_refused(query: Any) -> None:
    with pytest.raises(BadRequest):
        DryRunQuery.of(query, {})


@pytest.mark.parametrize("document", [SCORED, None])
def test_weights_change_only_the_weights(document: Any) -> None:
    made = scheduling(document)
    name = "queue-scorer" if document else "latency-scorer"
    changed = reweighed(read(document), made, {name: 7.0})
    again = build(changed, REGISTRY, ports())
    weights = {use.ref: use.weight for profile in again.effective.profiles for use in profile.uses}
    before = {use.ref: use.weight for profile in made.effective.profiles for use in profile.uses}
    assert weights == {**before, name: 7.0}


def test_an_unknown_scorer_is_refused_with_a_suggestion() -> None:
    with pytest.raises(BadRequest, match="did you mean 'queue-scorer'"):
        reweighed(read(SCORED), scheduling(SCORED), {"queue-scorr": 1.0})
