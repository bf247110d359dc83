"""The golden renders: what each value set changes in the basic one.

    python -m tests.deploy.golden        writes them

`basic.yaml` is whole; the others name what is gone, have what is new whole, and of the rest the differences.
So a change of the chart shows once, and a value set shows just what it is for.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator

from dispatcher import __version__
from tests.deploy.cases import CASES
from tests.deploy.release import CHART, Release, case
from tests.paths import ROOT

GOLDEN = ROOT / "tests" / "deploy" / "golden"
BASE = "basic"


def golden(name: str) -> str:
    """The text that stands in the file of a value set."""
    if name == BASE:
        return "".join(f"---\n{text}" for text in parts(case(BASE)).values())
    return "\n".join(_differences(parts(case(BASE)), parts(case(name)))) + "\n"


def _differences(base: dict[str, str], mine: dict[str, str]) -> Iterator[str]:
    for what in sorted({*base, *mine}):
        if what not in mine:
            yield f"gone: {what}"
        elif what not in base:
            yield f"new: {what}"
            yield mine[what]
        elif mine[what] != base[what]:
            yield f"changed: {what}"
            lines = difflib.unified_diff(base[what].splitlines(), mine[what].splitlines(), n=1, lineterm="")
            yield from (line.rstrip() for line in list(lines)[2:] if not line.startswith("@@"))


def parts(release: Release) -> dict[str, str]:
    """Each object's text, without what is long and held elsewhere, and without the version."""
    found = {}
    for text in re.split(r"^---\n(?:# Source: .*\n)?", release.text, flags=re.MULTILINE):
        if kind := re.search(r"^kind: (.+)", text, re.MULTILINE):
            name = re.search(r"^  name: [\"']?(.+?)[\"']?$", text, re.MULTILINE)
            assert name is not None
            found[f"{kind[1]} {name[1]}"] = _short(text)
    return dict(sorted(found.items()))


def _short(text: str) -> str:
    for each in text.splitlines():
        if each.startswith("  batch-dispatcher.json: "):
            assert json.loads(each.partition(": ")[2]) == (CHART / "files" / "dashboard.json").read_text()
            text = text.replace(each, "  batch-dispatcher.json: <files/dashboard.json>")
    return text.replace(__version__, "<version>")


def path(name: str) -> str:
    return f"{name}.yaml" if name == BASE else f"{name}.diff"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for name in CASES:
        (GOLDEN / path(name)).write_text(golden(name))


if __name__ == "__main__":
    main()
