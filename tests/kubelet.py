"""A ConfigMap volume as the kubelet lays it out, and changes it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

FILE = "config.yaml"
_generations = itertools.count(1)


def mount(directory: Path, text: str) -> Path:
    """A new volume; the path by which a program knows its file."""
    directory.mkdir(parents=True)
    (directory / "..data").symlink_to(_written(directory, text))
    (directory / FILE).symlink_to(Path("..data") / FILE)
    return directory / FILE


def swap(directory: Path, text: str) -> None:
    """A changed ConfigMap: a new directory, `..data` renamed over the old link, the old directory gone."""
    (directory / "..data_tmp").symlink_to(_written(directory, text))
    old = (directory / "..data").readlink()
    (directory / "..data_tmp").rename(directory / "..data")
    shutil.rmtree(directory / old)


def _written(directory: Path, text: str) -> str:
    fresh = f"..2026_11_21_22_33_44.{next(_generations):09}"
    (directory / fresh).mkdir()
    (directory / fresh / FILE).write_text(text)
    return fresh
