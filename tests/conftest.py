"""What holds for all tests."""

import os
from collections.abc import Mapping
from typing import Any

from hypothesis import settings

from tests.helpers import patience

# The same examples everywhere, and as long as they take: what Hypothesis does by itself only where CI is set.
settings.load_profile("ci")

# Some two hundred programs are started here: with it each compiles all that it imports, for a third of its CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

patience.install()


def pytest_asyncio_loop_factories() -> Mapping[str, Any]:
    return patience.loops()
