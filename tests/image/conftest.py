"""Container engine that all tests of a module share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.image.container_engine import Engine
from tests.paths import ROOT


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if os.geteuid() != 0:
        pytest.skip("debootstrap and the chroot of the build need root")
    directory = ROOT / "build" / "image-test"
    directory.mkdir(parents=True, exist_ok=True)
    engine = Engine(directory)
    yield engine
    engine.close()
