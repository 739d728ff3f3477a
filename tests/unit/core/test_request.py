"""Requests that become others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.request import InferenceRequest, Naming, Prompt, changed

REQUEST = InferenceRequest(
    "id", "/path", "model", Prompt((b"text",)), b"body", {"a": "b"}, True, 7, -1, "tenant", 1.0, 2.0, True, Naming("x")
)


def test_a_changed_request_keeps_all_other_fields() -> None:
    other = changed(REQUEST, model="other", priority=3)
    assert other == replace(REQUEST, model="other", priority=3)
    assert other.state is REQUEST.state
    assert REQUEST.model == "model"


def test_an_unknown_field_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        changed(REQUEST, modle="other")
