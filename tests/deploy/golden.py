"""Golden files of the chart: the rendered objects of each case, as differences from the basic one.

    python -m tests.deploy.golden        writes the files

`basic.yaml` is complete. Each other file lists removed objects, contains new objects and shows changed
lines. A change of the chart appears once, and each file shows only the effect of its case.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator

from dispatcher import __version__
from tests.deploy.cases import CASES
from tests.deploy.release import CHART, Release, render_case
from tests.paths import ROOT

GOLDEN = ROOT / "tests" / "deploy" / "golden"
BASE_CASE = "basic"


def render_golden(name: str) -> str:
    """Return the content of the golden file of a case."""
    if name == BASE_CASE:
        return "".join(f"---\n{text}" for text in split_objects(render_case(BASE_CASE)).values())
    return (
        "\n".join(_differences(split_objects(render_case(BASE_CASE)), split_objects(render_case(name))))
        + "\n"
    )


def _differences(base: dict[str, str], objects: dict[str, str]) -> Iterator[str]:
    for title in sorted({*base, *objects}):
        if title not in objects:
            yield f"gone: {title}"
        elif title not in base:
            yield f"new: {title}"
            yield objects[title]
        elif objects[title] != base[title]:
            yield f"changed: {title}"
            lines = difflib.unified_diff(
                base[title].splitlines(), objects[title].splitlines(), n=1, lineterm=""
            )
            yield from (line.rstrip() for line in list(lines)[2:] if not line.startswith("@@"))


def split_objects(release: Release) -> dict[str, str]:
    """Return the text of each object by kind and name, without the dashboard and the version."""
    found = {}
    for text in re.split(r"^---\n(?:# Source: .*\n)?", release.text, flags=re.MULTILINE):
        if kind := re.search(r"^kind: (.+)", text, re.MULTILINE):
            name = re.search(r"^  name: [\"']?(.+?)[\"']?$", text, re.MULTILINE)
            assert name is not None
            found[f"{kind[1]} {name[1]}"] = _shorten(text)
    return dict(sorted(found.items()))


def _shorten(text: str) -> str:
    for line in text.splitlines():
        if line.startswith("  batch-dispatcher.json: "):
            assert json.loads(line.partition(": ")[2]) == (CHART / "files" / "dashboard.json").read_text()
            text = text.replace(line, "  batch-dispatcher.json: <files/dashboard.json>")
    return text.replace(__version__, "<version>")


def golden_path(name: str) -> str:
    return f"{name}.yaml" if name == BASE_CASE else f"{name}.diff"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for name in CASES:
        (GOLDEN / golden_path(name)).write_text(render_golden(name))


if __name__ == "__main__":
    main()
