"""The setting `batching.rules[].shape` accepts exactly the shapes of the core."""

from __future__ import annotations

from typing import get_args

from dispatcher.features.merging.settings import ShapeName
from dispatcher.features.merging.shapes.table import SHAPES


def test_setting_accepts_every_shape_and_no_other() -> None:
    assert set(get_args(ShapeName)) == set(SHAPES)
