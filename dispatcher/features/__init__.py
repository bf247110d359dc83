"""Features: each is a folder that the kernel can do without.

A build without a feature lacks its folder and nothing else. No other file names all features. What the rest
of the program needs of a feature is in modules or files with the same name in each folder, which
`import_modules` and `find_files` find.
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ORDER = ("sequences", "models", "slices", "tokens", "merging", "batch_files", "named_streams")
"""Names of all features, in the order in which the kernel asks them."""
_FOLDER = Path(__file__).parent
FEATURES = tuple(name for name in ORDER if (_FOLDER / name / "__init__.py").is_file())
"""Names of the features that this build has."""


@cache
def import_modules(name: str) -> Mapping[str, ModuleType]:
    """Import the module `name` of each feature that has one, and return them by feature, in their order."""
    return {
        feature: import_module(f"{__name__}.{feature}.{name}")
        for feature in FEATURES
        if (_FOLDER / feature / f"{name}.py").is_file()
    }


def find_files(name: str) -> list[Path]:
    """Return the file `name` of each feature that has one, in alphabetical order of the features."""
    return [file for feature in sorted(FEATURES) if (file := _FOLDER / feature / name).is_file()]
