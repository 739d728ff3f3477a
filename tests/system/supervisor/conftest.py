"""Workers that are tested here have time."""

from __future__ import annotations

from tests.helpers.supervisor.host import unhurried

__all__ = ["unhurried"]
