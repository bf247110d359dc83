"""Words of features in the folders that must not know them, and the list of the lines that still have one.

`python -m tests.structure.feature_words` lowers the list to what is found, and prints the sums by feature.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.paths import PACKAGE, ROOT

FOLDERS = ("kernel", "limit", "requests", "queue", "service")
SUFFIXES = {".py", ".lua", ".js", ".html", ".css"}
WORDS = {
    "slices": {"slice", "slices", "sliced", "slicer", "slicing"},
    "sequences": {
        *("sequence", "sequences", "sequenced", "turn", "turns"),
        *("session", "sessions", "conversation", "conversations"),
    },
    "merging": {
        *("merge", "merges", "merged", "merger", "merging"),
        "batching",
    },
    # Not "model": requests and servers have models without this feature.
    "models": {
        *("registry", "version", "versions", "rollover", "pin", "pins", "pinned"),
        *("warm", "warmup", "warmups", "warmed", "warming"),
    },
}
"""Words of each feature. A name such as `turn_checker` or `TurnChecker` consists of words."""
PHRASES = {
    "models": re.compile(r"waiting_for_model|wait(s|ing)? for (a|its|the|their) models?\b", re.IGNORECASE),
    "batch_files": re.compile(r"batch[ _]?files?\b|\brun_file\b", re.IGNORECASE),
    # Not "token": leases and answers have tokens without this feature.
    "tokens": re.compile(r"token[ _]?budgets?\b|\bcounts?_tokens\b|tokens are counted", re.IGNORECASE),
    "named_streams": re.compile(r"named[ _]?streams?\b|\b(forget_stream|stream_status)\b", re.IGNORECASE),
}
"""Patterns of features whose single words mean other things as well."""
GENERAL = re.compile(
    r"\b(Mutable)?Sequence\b"  # the type
    r"|\b(Task|(Base)?Exception)Group\b|\btask_group\b"
    r"|_?key_groups?\b|\b_KEY_GROUPS\b"  # the keys that a script declares by one word
    r"|\b(redis|valkey|engine|python|__)_?version(__)?\b|\bversion=__version__"  # of a program
    r"|\bstatus\.version\b"  # of this program
    r"|\bstart_new_session\b|\bClientSession\b"
    r"|\.slice\("  # of an array or a text in JavaScript
)
"""Terms that contain a word of a feature and have nothing to do with it."""
LIST = Path(__file__).with_name("feature_words.txt")
_HEAD = """\
# Lines with words of a feature, outside of it: file, feature, number of lines. The list may only get shorter.
# `python -m tests.structure.feature_words` lowers the numbers to what is found.
"""
_ANY = re.compile(
    "|".join(
        [*(word for words in WORDS.values() for word in words), *(each.pattern for each in PHRASES.values())]
    ),
    re.IGNORECASE,
)
"""Pattern of all lines that may have a word of a feature: most lines have none, which is found fast."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
Counts = Counter[tuple[str, str]]
"""Number of lines by file and feature."""


def find_features(line: str) -> Iterator[str]:
    """Yield the features of which a line has a word."""
    if _ANY.search(line) is None:
        return
    line = GENERAL.sub(" ", line)
    words = {word.lower() for word in _WORD.findall(line)}
    for feature in WORDS | PHRASES:
        if words & WORDS.get(feature, set()) or (
            feature in PHRASES and PHRASES[feature].search(line) is not None
        ):
            yield feature


def count_lines(package: Path = PACKAGE) -> Counts:
    """Return how many lines have words of features. The name of a file counts as a line of it."""
    found: Counts = Counter()
    for folder in FOLDERS:
        for path in (package / folder).rglob("*"):
            if path.suffix in SUFFIXES:
                name = path.relative_to(package).as_posix()
                for line in (path.stem, *path.read_text(encoding="utf-8").splitlines()):
                    found.update((name, feature) for feature in find_features(line))
    return found


def read_list() -> Counts:
    """Return the numbers of the list."""
    rows = (line.split() for line in LIST.read_text().splitlines() if not line.startswith("#"))
    return Counter({(name, feature): int(count) for name, feature, count in rows})


def find_differences(found: Counts, listed: Counts) -> list[str]:
    """Return a sentence for each file and feature whose number is not the listed one."""
    return [
        f"{name}: {found[name, feature]} lines with words of {feature}, {listed[name, feature]} are listed"
        for name, feature in sorted(found | listed)
        if found[name, feature] != listed[name, feature]
    ]


def main() -> int:
    found, listed = count_lines(), read_list() if LIST.exists() else count_lines()
    kept = found & listed  # the smaller number of each
    rows = [f"{name} {feature} {count}" for (name, feature), count in sorted(kept.items())]
    LIST.write_text(_HEAD + "\n".join(rows) + "\n")
    for feature in sorted(WORDS | PHRASES):
        counts = {name: count for (name, each), count in found.items() if each == feature}
        print(f"{feature:<14} {sum(counts.values()):5} lines in {len(counts):3} files")
    raised = find_differences(found, kept)
    print(*raised, f"{LIST.relative_to(ROOT)} is written", sep="\n")
    return 1 if raised else 0


if __name__ == "__main__":
    sys.exit(main())
