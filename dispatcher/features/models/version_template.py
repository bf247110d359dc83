"""Template for the names of a model's versions, such as `qwen-v{version}`.

The module is separate because every CLI command reads settings, but few need versions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

PLACEHOLDER = "{version}"
_VERSION = re.compile("[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class VersionTemplate:
    """Text before and after the version in the name of a model. Both are matched literally."""

    prefix: str
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the template that a text describes. Raises ValueError with the end of a sentence."""
        prefix, placeholder, suffix = text.partition(PLACEHOLDER)
        if not placeholder or PLACEHOLDER in suffix:
            how = f"exactly once, as in qwen-v{PLACEHOLDER}; all other text is literal"
            raise ValueError(f"must contain {PLACEHOLDER} {how}")
        if any(brace in prefix + suffix for brace in "{}"):
            raise ValueError(f"must not contain {{ or }} outside of {PLACEHOLDER}")
        return cls(prefix, suffix)

    def extract_version(self, name: str) -> str | None:
        """Return the version in the name of a model. `None` if the name does not match the template."""
        if not (name.startswith(self.prefix) and name.endswith(self.suffix)):
            return None
        # If prefix and suffix overlap in a short name, the slice between them is empty.
        version = name[len(self.prefix) : len(name) - len(self.suffix)]
        return version if _VERSION.fullmatch(version) else None
