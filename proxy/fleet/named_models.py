"""Which models the pods of a fleet name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.endpoint import EndpointState, update
from proxy.core.errors import BadRequest
from proxy.fleet.member import Member

MOST_KNOWN = 20_000
"""Models that pods have named and name no more, to tell a model that is away from one that never was."""


class NamedModels:
    """Of `members`, who may change."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._known: dict[str, None] = {}
        """Those that were ever named, the one named last at the end; the oldest are forgotten."""

    def learn(self, member: Member) -> bool:
        """From its settings and its cards; whether it serves others than before."""
        models = frozenset(member.pod.models or [card["id"] for card in member.cards]) or None
        adapters = frozenset(card["id"] for card in member.cards if card.get("parent"))
        update(member.endpoint, adapters=adapters)
        is_new = models != member.endpoint.models
        if is_new:
            update(member.endpoint, models=models)
            for model in models or ():
                self._known.pop(model, None)
                self._known[model] = None
            while len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return is_new

    def knows(self, model: str) -> bool:
        """False if no pod ever named the model, though they have spoken, and each that is there names its models."""
        if not self._known or model in self._known or self.is_listed(model):
            return True
        return any(member.takes_any for member in self._members.values())

    def is_listed(self, model: str) -> bool:
        """Return whether a pod in any state lists the model."""
        return any(model in (member.endpoint.models or ()) for member in self._members.values())

    def only(self, wakes: bool) -> str:
        """What a request gets that names no model: the one there is, LoRA adapters and further names of it aside; empty
        if pods name none. Raises BadRequest if there are several."""
        adapters = {card["id"] for member in self._members.values() for card in member.cards if card.get("parent")}
        models = {model for member in self._members.values() for model in member.first_names} - adapters
        if len(models) > 1 and (cards := self.cards(wakes)):
            names = ", ".join(card["id"] for card in cards)
            raise BadRequest(f"'model' is missing, and there are several: {names}.", param="model")
        return models.pop() if len(models) == 1 else ""

    def cards(self, wakes: bool) -> list[dict[str, Any]]:
        """Of the models that pods serve, or would if they were woken, where somebody wakes them; as the first pod by
        name gives them."""
        merged: dict[str, dict[str, Any]] = {}
        members = sorted(self._members.values(), key=lambda member: member.endpoint.name)
        for member in members:
            if member.endpoint.state is EndpointState.READY or (wakes and member.can_be_woken):
                for card in member.shown_cards:
                    merged.setdefault(card["id"], dict(card))
        return list(merged.values())
