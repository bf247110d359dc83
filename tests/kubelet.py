"""A ConfigMap volume, laid out and updated as by the kubelet."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

FILE_NAME = "config.yaml"
_generations = itertools.count(1)


def mount_file(directory: Path, text: str) -> Path:
    """Create a volume with one file. Return the path at which programs open the file."""
    directory.mkdir(parents=True)
    (directory / "..data").symlink_to(_write_generation(directory, text))
    (directory / FILE_NAME).symlink_to(Path("..data") / FILE_NAME)
    return directory / FILE_NAME


def replace_file(directory: Path, text: str) -> None:
    """Update the file as for a changed ConfigMap.

    The kubelet writes a new directory, renames a new `..data` link over the old one and removes the old
    directory.
    """
    (directory / "..data_tmp").symlink_to(_write_generation(directory, text))
    old = (directory / "..data").readlink()
    (directory / "..data_tmp").rename(directory / "..data")
    shutil.rmtree(directory / old)


def _write_generation(directory: Path, text: str) -> str:
    generation = f"..2026_11_21_22_33_44.{next(_generations):09}"
    (directory / generation).mkdir()
    (directory / generation / FILE_NAME).write_text(text)
    return generation
