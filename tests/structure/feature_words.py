"""Words of features, which the folders of the kernel must not contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import PACKAGE

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
    r"|x-session-(id|token)"  # headers of the endpoint picker
    r"|\.slice\("  # of an array or a text in JavaScript
)
"""Terms that contain a word of a feature and have nothing to do with it."""
_ANY = re.compile(
    "|".join(
        [*(word for words in WORDS.values() for word in words), *(each.pattern for each in PHRASES.values())]
    ),
    re.IGNORECASE,
)
"""Pattern of all lines that may have a word of a feature: most lines have none, which is found fast."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


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


def find_lines(package: Path = PACKAGE) -> Iterator[str]:
    """Yield a sentence for each line with a word of a feature. The name of a file counts as its line 0."""
    for folder in FOLDERS:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            for number, line in enumerate((path.stem, *path.read_text(encoding="utf-8").splitlines())):
                for feature in find_features(line):
                    yield f"{path.relative_to(package).as_posix()}:{number}: a word of {feature}"
