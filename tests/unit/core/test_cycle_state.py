"""Typed state of one request."""

from typing import Any

import pytest

from proxy.core.request import CycleState, DataKey

HEAT: DataKey[float] = DataKey("Heat")


def test_a_missing_datum_is_none() -> None:
    assert CycleState().read(HEAT) is None


def test_a_datum_is_written_once() -> None:
    state = CycleState()
    state.write(HEAT, 1.0)
    with pytest.raises(KeyError, match="Heat is written once"):
        state.write(HEAT, 2.0)
    assert state.read(HEAT) == 1.0


def test_a_bound_write_satisfies_unbound_reads_and_no_other_bound_ones() -> None:
    state = CycleState()
    state.write(HEAT.of("oven"), 1.0)
    assert state.read(HEAT) == state.read(HEAT.of("oven")) == 1.0
    assert state.read(HEAT.of("sun")) is None


def test_two_producers_of_one_kind_are_separate() -> None:
    state = CycleState()
    state.write(HEAT.of("oven"), 1.0)
    state.write(HEAT.of("sun"), 2.0)
    assert (state.read(HEAT.of("oven")), state.read(HEAT.of("sun"))) == (1.0, 2.0)


def test_keys_are_equal_by_kind_and_producer() -> None:
    assert DataKey("Heat") == HEAT == HEAT.of("")
    assert HEAT.of("oven") == DataKey("Heat", "oven") != HEAT
    assert len({HEAT, DataKey("Heat"), HEAT.of("oven")}) == 2
    assert (repr(HEAT), repr(HEAT.of("oven"))) == ("Heat", "Heat/oven")


def test_a_value_of_another_type_than_the_key_is_refused() -> None:
    state, warmth = CycleState(), DataKey[Any]("Warmth", value_type=float)
    with pytest.raises(TypeError, match="Warmth/oven holds values of type float, not str"):
        state.write(warmth.of("oven"), "hot")
    assert state.read(warmth) is None
    state.write(warmth.of("oven"), 21)
    assert state.read(warmth) == 21
