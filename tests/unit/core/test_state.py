"""What survives a reload: the objects that both configurations name, and nothing else."""

from __future__ import annotations

import pytest

from proxy.core.state import State


class Thing:
    """Writes down when it is entered and closed."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.limit = 0
        self._log = log

    async def __aenter__(self) -> Thing:
        self._log.append(f"enter {self.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._log.append(f"close {self.name}")


async def test_renamed_objects_stay_and_others_are_closed() -> None:
    state, log = State(), list[str]()
    first = state.draft()
    kept, dropped = first.get("kept", lambda: Thing("kept", log)), first.get("dropped", lambda: Thing("dropped", log))
    first.commit()
    await state.finish_commit()
    second = state.draft()
    assert second.get("kept", lambda: Thing("other", log)) is kept
    assert second.get("new", lambda: Thing("new", log)) is not dropped
    second.commit()
    await state.finish_commit()
    assert log == ["enter kept", "enter dropped", "close dropped", "enter new"]
    await state.close()
    assert log[4:] == ["close new", "close kept"]


async def test_a_draft_that_is_not_committed_changes_nothing() -> None:
    state, log = State(), list[str]()
    draft = state.draft()
    thing = draft.get("thing", lambda: Thing("thing", log))
    draft.commit()
    await state.finish_commit()
    abandoned = state.draft()
    abandoned.get("other", lambda: Thing("other", log))
    abandoned.assign(thing, limit=7)
    await state.finish_commit()
    assert (log, thing.limit) == (["enter thing"], 0)
    assert state.draft().get("thing", lambda: Thing("thing", log)) is thing


async def test_an_object_with_another_specification_is_replaced() -> None:
    state, log = State(), list[str]()
    for of in ("a", "a", "b"):
        draft = state.draft()
        draft.get("thing", lambda of=of: Thing(of, log), of)  # type: ignore[misc]
        draft.commit()
        await state.finish_commit()
    assert log == ["enter a", "close a", "enter b"]


async def test_an_object_that_stays_keeps_its_resources() -> None:
    state, log = State(), list[str]()

    for of in ("a", "a", "b"):
        draft = state.draft()

        def make() -> Thing:
            draft.get(("part", of), lambda: Thing(f"part of {of}", log))  # noqa: B023
            return Thing(of, log)  # noqa: B023

        draft.get("whole", make, of)
        draft.commit()
        await state.finish_commit()
    assert log == ["enter part of a", "enter a", "close a", "close part of a", "enter part of b", "enter b"]


def test_assignments_apply_when_the_draft_is_committed() -> None:
    state, thing = State(), Thing("thing", [])
    draft = state.draft()
    draft.assign(thing, limit=3)
    assert thing.limit == 0
    draft.commit()
    assert thing.limit == 3


def test_an_attribute_that_does_not_exist_is_refused_before_anything_changes() -> None:
    with pytest.raises(AttributeError):
        State().draft().assign(Thing("thing", []), limits=3)
