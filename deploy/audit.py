"""What is known against what is pinned, and under which licences it comes: `make audit`.

    python deploy/audit.py PIP_AUDIT        # the program

Exit codes: 0 every pin was looked up and nothing is known against it; 1 something is; 2 nothing is known of
some pins, or of all: no advisory source was reached, or it does not have them. A pin that nobody looked up is
never called good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from sbom import licences, plain

PINS = Path(__file__).parents[1] / "constraints.txt"
COPYLEFT = ("gpl", "agpl", "lgpl", "sspl", "eupl", "cddl", "epl")


def judged(report: str, error: str) -> tuple[int, list[str]]:
    """Exit code and lines for what pip-audit wrote."""
    try:
        found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (error.strip().splitlines() or ["it said nothing"])[-1][:300]
        return 2, [f"not known: no advisory source was reached: {last}"]
    lines = [
        f"{each['name']} {each['version']}: {flaw['id']}, "
        f"mended in {', '.join(flaw['fix_versions']) or 'no release'}"
        for each in found
        for flaw in each.get("vulns", ())
    ]
    skipped = [each for each in found if "skip_reason" in each]
    code = 1 if lines else 2 if skipped or not found else 0
    if skipped:
        lines.append(f"not known: {len(skipped)} of {len(found)} pins: {skipped[0]['skip_reason'][:200]}")
    lines.append(f"{len(found) - len(skipped)} pins looked up")
    return code, lines


def licensed() -> Iterator[str]:
    """One line for each licence that installed packages name, those that ask for more than a notice first."""
    by_licence: dict[str, set[str]] = {}
    for package in distributions():
        for each in licences(package):
            said = each.get("expression") or each["license"]["name"]
            by_licence.setdefault(said, set()).add(plain(package.metadata["Name"]))
    for said in sorted(by_licence, key=lambda name: (not _is_copyleft(name), name)):
        mark = "LOOK AT: " if _is_copyleft(said) else ""
        yield f"{mark}{said}: {', '.join(sorted(by_licence[said]))}"


def _is_copyleft(licence: str) -> bool:
    words = licence.lower().replace("-", " ").replace("(", " ").replace("v", " ").split()
    return any(word in COPYLEFT for word in words) or "general public" in licence.lower()


def main() -> int:
    """Ask, and print."""
    command = [
        sys.argv[1],
        "--requirement",
        str(PINS),
        "--disable-pip",
        "--require-hashes",
        "--format",
        "json",
    ]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    code, lines = judged(asked.stdout, asked.stderr)
    sys.stdout.write("\n".join(["Advisories:", *lines, "", "Licences:", *licensed()]) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
