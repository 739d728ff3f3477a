"""What survives a reload, and how one configuration replaces another as a whole."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

Share = Callable[[Hashable, object, object], tuple[object, object]]
"""Called with the key of a new object, what it is made from, and the object. Returns the object to keep in its place,
and what shares it with other processes, or None."""


class State:
    """Objects that outlive the configuration they were made under, by key.

    A draft names the objects of one configuration. Building a draft changes nothing. Its `commit` is one synchronous
    step: objects that are named again stay and get their new settings, the others are dropped. `finish_commit` then
    closes the dropped objects and enters the new ones, where they are context managers.
    """

    def __init__(self, share: Share = lambda key, made_from, made: (made, None)) -> None:
        self._share = share
        self._entries: dict[Hashable, _Entry] = {}
        self._dropped: list[_Entry] = []

    def draft(self) -> Draft:
        return Draft(self)

    @property
    def shared(self) -> list[Any]:
        """What shares the objects in use with other processes."""
        return [entry.shared for entry in self._entries.values() if entry.shared is not None]

    async def finish_commit(self) -> None:
        """Close what the last commits dropped, the newest first, then enter what they added, the oldest first."""
        while self._dropped:
            await self._dropped.pop().close()
        for entry in list(self._entries.values()):
            await entry.enter()

    async def close(self) -> None:
        """Close all objects, the newest first."""
        self.draft().commit()
        await self.finish_commit()


class Draft:
    """The objects that one configuration names, and the settings that they get when it is put in use."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._named: dict[Hashable, _Entry] = {}
        self._changes: list[Callable[[], object]] = []
        self._making: list[_Entry] = []
        self._made: list[_Entry] = []

    def get(self, key: Hashable, make: Callable[[], T], made_from: object = None) -> T:
        """Return the object of this key in use if its `made_from` is equal, else a new one. Objects that `make` gets
        from this draft are owned by the new object and live as long as it."""
        entry = self._named.get(key) or self._state._entries.get(key)
        if entry is None or entry.made_from != made_from:
            entry = self._make(key, make, made_from)
        elif key not in self._named:
            self._name_again(key, entry)
        if self._making:
            self._making[-1].owned.append(key)
        value: T = entry.value
        return value

    def get_and_assign(self, key: Hashable, make: Callable[[], T], **attributes: Any) -> T:
        """Return the object of this key in use, else a new one, and assign these attributes to it."""
        value = self.get(key, make)
        self.assign(value, **attributes)
        return value

    def assign(self, owner: object, **attributes: Any) -> None:
        """Assign these attributes when the draft is committed. Raise AttributeError for one that does not exist."""
        for name, value in attributes.items():
            getattr(owner, name)
            self._changes.append(partial(setattr, owner, name, value))

    def at_commit(self, change: Callable[[], object]) -> None:
        """Call this when the draft is committed; it must not raise."""
        self._changes.append(change)

    def commit(self) -> None:
        """Put the draft in use: apply the requested changes in their order."""
        state, named, self._named = self._state, self._named, {}
        state._dropped += [entry for key, entry in state._entries.items() if named.get(key) is not entry]
        state._entries = named
        changes, self._changes, self._made = self._changes, [], []
        for change in changes:
            change()

    async def discard(self) -> None:
        """Close the objects that were made for this draft, which is not committed. It is needed only if they were used:
        constructors open nothing."""
        while self._made:
            await self._made.pop().exit()

    def _name_again(self, key: Hashable, entry: _Entry) -> None:
        for owned in entry.owned:
            if owned not in self._named:
                self._name_again(owned, self._state._entries[owned])
        self._named[key] = entry

    def _make(self, key: Hashable, make: Callable[[], T], made_from: object) -> _Entry:
        entry = _Entry(made_from)
        self._making.append(entry)
        try:
            entry.value, entry.shared = self._state._share(key, made_from, make())
        finally:
            self._making.pop()
        self._named[key] = entry
        self._made.append(entry)
        return entry


@dataclass(frozen=True, slots=True)
class PluginState:
    """The objects of one plugin that survive a reload. A plugin that has a field of this type gets it injected.

    Without a draft, as in tests and in dry runs of requests (`dry_run.py`), every object is new and every change takes
    effect at once. A check of a configuration (`?dry_run=1`) has a draft that is never committed: it gets the objects
    in use. All instances are equal: they do not decide whether a plugin is made again.
    """

    _draft: Draft | None = field(default=None, compare=False, repr=False)
    _owner: tuple[Hashable, ...] = field(default=(), compare=False, repr=False)
    """Pool, name and type of the plugin."""

    def get(self, key: str, make: Callable[[], T], of: object = None) -> T:
        """Return the object of this key that the plugin of this name and type has in the configuration in use, if its
        `of`, from which `make` makes it, is equal; else a new one. Call it in `__post_init__`."""
        return make() if self._draft is None else self._draft.get(("plugin state", *self._owner, key), make, of)

    def at_commit(self, change: Callable[[], object]) -> None:
        """Call `change` when the new configuration takes effect. An object that the instance in use shares must not be
        changed earlier."""
        if self._draft is None:
            change()
        else:
            self._draft.at_commit(change)


@dataclass(slots=True, eq=False)
class _Entry:
    made_from: object
    owned: list[Hashable] = field(default_factory=list)
    value: Any = None
    shared: Any = None
    is_entered: bool = False

    async def enter(self) -> None:
        if not self.is_entered and isinstance(self.value, AbstractAsyncContextManager):
            self.is_entered = True
            await self.value.__aenter__()

    async def close(self) -> None:
        if self.is_entered:
            await self.exit()

    async def exit(self) -> None:
        if isinstance(self.value, AbstractAsyncContextManager):
            self.is_entered = False
            await self.value.__aexit__(None, None, None)
