"""The fleet that all tests here share, and the page that says what they found."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from tests.vllm import fleet as fleets
from tests.vllm.fleet import Fleet, Vllm
from tests.vllm.report import Check, facts, page

PYTHON = "KVLANE_VLLM_PYTHON"
"""Names the Python that has vLLM. `make test-vllm` sets it; without it nothing here runs."""

REPORT = "KVLANE_VLLM_REPORT"
"""Names the file that what was found is written to."""

CHECKS = pytest.StashKey[dict[str, Check]]()
"""By the test's id."""

FACTS = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    python = os.environ.get(PYTHON)
    if python is None:
        pytest.skip("needs two real vLLM engines: make test-vllm")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engines end with us then, too
    try:
        return fleets.written(Path(python), tmp_path_factory.mktemp("served"))
    except (OSError, CalledProcessError) as error:
        pytest.exit(str(error), returncode=1)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest, vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        try:
            running = stack.enter_context(fleets.running(vllm, tmp_path_factory.mktemp("vllm")))
        except RuntimeError as error:
            pytest.exit(str(error), returncode=1)
        request.session.stash[FACTS] = facts(vllm.python, running)
        yield running


@pytest.fixture
def fresh(fleet: Fleet, tmp_path: Path) -> Iterator[Fleet]:
    """The same engines behind a proxy without a past, which therefore prefers none of them."""
    with fleets.proxy(fleet.urls, tmp_path / "proxy.log") as proxy:
        yield replace(fleet, proxy=proxy)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Properties that a test recorded are its figures."""
    report = yield
    if report.when == "call" or report.failed:
        module = item.getparent(pytest.Module)
        about = ((module and module.obj.__doc__) or "").strip()
        checks = item.session.stash.setdefault(CHECKS, {})
        checks[item.nodeid] = Check(about, item.name, report.passed, dict(report.user_properties))
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """An interrupted run says nothing."""
    target, about = os.environ.get(REPORT), session.stash.get(FACTS, None)
    if target and about is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        Path(target).parent.mkdir(exist_ok=True)
        Path(target).write_text(page(about, list(session.stash[CHECKS].values())))
