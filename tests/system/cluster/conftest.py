"""Workers that are tested here have time."""

from __future__ import annotations

from tests.helpers.cluster.host import unhurried

__all__ = ["unhurried"]
