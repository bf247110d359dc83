"""Known vulnerabilities and licences of the pinned packages: `make audit`.

    python deploy/audit.py PIP_AUDIT        # path of the pip-audit program

Exit codes: 0 every pin was looked up and has no known vulnerability; 1 a pin has one; 2 some pins or all
could not be looked up, because no advisory source was reached or the source does not have them. A pin that
was not looked up is never reported as good.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from sbom import find_licences, normalize_name

PINS = Path(__file__).parents[1] / "constraints.txt"
COPYLEFT = ("gpl", "agpl", "lgpl", "sspl", "eupl", "cddl", "epl")


def evaluate_report(report: str, error: str) -> tuple[int, list[str]]:
    """Return the exit code and the lines for a report of pip-audit."""
    try:
        found: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (error.strip().splitlines() or ["it wrote nothing"])[-1][:300]
        return 2, [f"not known: no advisory source was reached: {last}"]
    lines = [
        f"{each['name']} {each['version']}: {vulnerability['id']}, "
        f"fixed in {', '.join(vulnerability['fix_versions']) or 'no release'}"
        for each in found
        for vulnerability in each.get("vulns", ())
    ]
    skipped = [each for each in found if "skip_reason" in each]
    code = 1 if lines else 2 if skipped or not found else 0
    if skipped:
        lines.append(f"not known: {len(skipped)} of {len(found)} pins: {skipped[0]['skip_reason'][:200]}")
    lines.append(f"{len(found) - len(skipped)} pins looked up")
    return code, lines


def list_licences() -> Iterator[str]:
    """Yield one line per licence of the installed packages, copyleft licences first."""
    by_licence: dict[str, set[str]] = {}
    for package in distributions():
        for each in find_licences(package):
            licence_name = each.get("expression") or each["license"]["name"]
            by_licence.setdefault(licence_name, set()).add(normalize_name(package.metadata["Name"]))
    for licence_name in sorted(by_licence, key=lambda name: (not _is_copyleft(name), name)):
        mark = "CHECK: " if _is_copyleft(licence_name) else ""
        yield f"{mark}{licence_name}: {', '.join(sorted(by_licence[licence_name]))}"


def _is_copyleft(licence: str) -> bool:
    words = licence.lower().replace("-", " ").replace("(", " ").replace("v", " ").split()
    return any(word in COPYLEFT for word in words) or "general public" in licence.lower()


def main() -> int:
    """Run pip-audit and print the result with the licences."""
    command = [
        sys.argv[1],
        "--requirement",
        str(PINS),
        "--disable-pip",
        "--require-hashes",
        "--format",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    code, lines = evaluate_report(done.stdout, done.stderr)
    sys.stdout.write("\n".join(["Advisories:", *lines, "", "Licences:", *list_licences()]) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
