"""What is counted of models that are asked for and others that are given."""

from __future__ import annotations

from proxy.telemetry.catalogue import Catalogue


class ModelSeries:
    """Implements `resolver.Watcher`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def rewritten(self, rule: str, model: str) -> None:
        self._catalogue.rewrites.cell(rule, model).add()

    def fell_back(self, model: str, to: str) -> None:
        self._catalogue.fallbacks.cell(model, to).add()
