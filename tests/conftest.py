"""What holds for all tests."""

import gc
import os
import signal
import sys
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from proxy.telemetry import lines
from tests.helpers import installed, patience
from tests.helpers.budget import Budget
from tests.helpers.waiting import PATIENCE

SYSTEM = "tests/system/"

# `make test` runs the same few examples everywhere. `make test-all` runs more examples, which are different each time.
# The command that it prints has their seed, and a failure prints how to repeat its example. The deadline of an example
# finds what does not end. Slow generation of examples says only that the machine is busy.
BUSY = (HealthCheck.too_slow,)
settings.register_profile(
    "fixed",
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=BUSY,
)
settings.register_profile(
    "random", database=None, deadline=timedelta(seconds=30), print_blob=True, suppress_health_check=BUSY
)
settings.load_profile("fixed")

# Some two hundred programs are started here: with it each compiles all that it imports, for a third of its CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # otherwise each process of a test run rewrites all tests

# A shell that starts tests in the background has them ignore SIGINT, and so would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

patience.install()
lines.STOP_TIMEOUT = PATIENCE  # of threads, which get their CPU late on a busy machine
installed.install()


def pytest_asyncio_loop_factories() -> Mapping[str, Any]:
    return patience.loops()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Budget())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: modules and tests stay, and scanning them takes a third of the CPU time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(5000)  # new objects, as in `kvlane serve`


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SYSTEM):
            item.add_marker("system")
