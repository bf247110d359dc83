"""Every setting has a use that a tutorial or a how-to guide shows. What nobody has a reason to set is a
constant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from dispatcher.settings.model import Settings
from dispatcher.settings.tls import TlsSettings
from tests.paths import DOCS

YAML_BLOCK = re.compile(r"^ *```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def list_settings(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of each setting. Keys of the entries of a list count, such as `models[].pin`."""
    for name, info in model.model_fields.items():
        if info.annotation is TlsSettings and prefix != "gateway.":  # the keys are those of `gateway.tls`
            yield f"{prefix}{name}"
            continue
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from list_settings(info.annotation, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}"
        for entry in get_args(info.annotation):
            if isinstance(entry, type) and issubclass(entry, BaseModel):
                yield from list_settings(entry, f"{prefix}{name}[].")


def list_keys(value: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each key of a configuration."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (inside := f"{path}.{name}" if path else str(name))
            yield from list_keys(inner, inside)
    elif isinstance(value, list):
        for entry in value:
            yield from list_keys(entry, f"{path}[]")


@cache
def read_named_settings() -> frozenset[str]:
    """Return what the guides name: in examples of a configuration or of Helm values, and by full paths in the
    text."""
    named: set[str] = set()
    for page in [*(DOCS / "how-to").rglob("*.md"), *(DOCS / "tutorials").rglob("*.md")]:
        text = page.read_text()
        named.update(re.findall(r"(?<![\w.])[a-z_]+(?:\[\])?(?:\.[a-z_]+(?:\[\])?)+", text))
        for block in YAML_BLOCK.findall(text):
            for document in yaml.safe_load_all(block):
                named.update(key.removeprefix("config.") for key in list_keys(document))
    return frozenset(named)


@pytest.mark.parametrize("path", list(list_settings(Settings)))
def test_setting_is_used_in_a_guide(path: str) -> None:
    assert path in read_named_settings()
