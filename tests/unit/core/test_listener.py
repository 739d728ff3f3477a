"""Listeners of one attempt in addition to listeners of all."""

from __future__ import annotations

import pytest

from proxy.core.attempt import Attempt
from proxy.core.listener import Listener, Listeners
from tests.helpers.plugins.situations import attempt, pod, request


class Counting(Listener):
    def __init__(self) -> None:
        self.began = 0

    def first_byte(self, attempt: Attempt) -> None:
        self.began += 1


def test_a_function_for_the_first_byte_is_called_for_its_attempt_alone() -> None:
    counting, called = Counting(), list[Attempt]()
    common = Listeners([counting])
    one, other = (attempt(request(), pod()) for _ in range(2))
    one.listeners, other.listeners = common.at_first_byte(called.append), common
    for each in (one, other):
        each.note_first_byte(7.0)
    assert called == [one]
    assert counting.began == 2
    assert (one.first_byte_at, other.first_byte_at) == (7.0, 7.0)


def test_a_listener_that_fails_is_logged_once_whatever_attempts_have_functions_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    common = Listeners([Counting()])
    for number in range(3):
        common.at_first_byte(lambda _: None).failed(common.first_byte[0], f"request-{number}")
    assert len(caplog.records) == 1


def test_a_listener_that_fails_at_the_first_byte_stops_neither_the_response_nor_the_other_listeners(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(Listener):
        def first_byte(self, attempt: Attempt) -> None:
            raise RuntimeError("a defect of the listener")

    counting, one = Counting(), attempt(request(), pod())
    one.listeners = Listeners([Failing(), counting])
    one.note_first_byte(7.0)
    assert counting.began == 1
    assert "Failing.first_byte" in caplog.text
