"""Tests here start no programs, so their loops skip waits."""

from __future__ import annotations

from tests.helpers.patience import skips_waits

__all__ = ["skips_waits"]
