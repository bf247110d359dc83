"""Settings of every test run. Most fixtures are in the directory of the tests that use them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import Browser, start_chromium
from tests.support import current_test, spread_over_parts

# On a shared machine any single example may be slow, which is no defect.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", parent=settings.get_profile("default"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell lets background jobs ignore Ctrl-C, and every process that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Disable garbage collection while tests are collected, and freeze the objects created meanwhile.

    Thousands of tests and their modules exist until the end, so scanning them for garbage is wasted time: one
    third of the collection time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after `-m` has removed items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let every second worker begin with its share of the tests that are marked `first`.

    xdist gives each worker one part of the list. Most of the long tests wait for other processes, and too
    many of these at once would delay each other, while the other workers use the CPU in between.
    """
    first = [item for item in items if item.get_closest_marker("first") is not None]
    others = [item for item in items if item.get_closest_marker("first") is None]
    worker_input = getattr(config, "workerinput", {"workercount": 1})
    items[:] = spread_over_parts(first, others, worker_input["workercount"])


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may need tools as well
def pytest_runtest_setup(item: pytest.Item) -> None:
    is_in_make_test = not any(item.get_closest_marker(mark) for mark in ("slow", "long"))
    current_test.may_build = not is_in_make_test
    if is_in_make_test and item.get_closest_marker("serial") is not None:
        pytest.fail("a serial test must be marked slow: `make test` passes on a busy machine")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a worker, since a start costs seconds of CPU.

    Each test has its own tab.
    """
    with start_chromium() as browser:
        yield browser
