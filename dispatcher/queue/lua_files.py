"""Lua files of the queue and of its features, and what the headers of features declare.

`queue/lua` has the files of the queue itself. A feature with scripts has a folder
`features/<name>/lua`. If it stores something with the requests of the queue, one of its files, the main file,
declares what it adds to every script:

    -- Feature: parts
    -- Extra: PROGRESS_BYTES 16
    -- Keys: STARTED zset started, PROGRESS hash progress
    -- Lane: STARTED T
    -- Control: progress
    -- Constants: MAX_PARTS 100
    -- Other keys: parts:secret, parts:revoked:<id>

`Extra` is the index of the feature in the array of an entry, which is never used for anything else again.
`Keys` are the name, the type and the suffix of its keys. `Pool keys` are those that all queues of a pool
share; only scripts get them that declare the name of the feature as their keys. `Lane` is the key and the
letter of a lane, and `closed` if no claim takes requests from it. `Control` is the field of CONTROL that is
set while the queue may have data of the feature. Scripts read it, so that a queue without such data needs no
further command. `Constants` are numbers that the files of the feature have by their names, and its Python
code by `LuaFeature.constants`. `Other keys` are suffixes of keys that the feature names by itself; one
with an id expires, and one without holds a text that is copied with the queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

_HEADER = re.compile(r"(?:--[^\n]*\n)+")
_DECLARATION = re.compile(
    r"^-- (Feature|Extra|Keys|Pool keys|Other keys|Lane|Control|Constants|"
    r"Hooks|Uses|Arguments|(?:List|Columns) \w+): (.*(?:\n--   .*)*)",
    re.MULTILINE,
)
"""Declaration in a header. Its further lines are indented."""


@dataclass(frozen=True, slots=True)
class LuaFeature:
    """Declarations of a feature that stores something with the requests of the queue."""

    name: str
    main_file: str
    extra: tuple[str, int]
    """Name and index of its value in the array of an entry."""
    keys: Mapping[str, tuple[str, str]]
    """Suffix and type of each key, by the name of the key in scripts."""
    pool_keys: Mapping[str, tuple[str, str]]
    """The same for its keys that all queues of a pool share."""
    lane: Sequence[str]
    """Key and letter of its lane, and `closed` if it is."""
    control: str
    """Field of CONTROL that is set while there may be data. Empty if there is none."""
    constants: Mapping[str, int]
    other_keys: Sequence[str]
    """Suffixes of further keys, each with a colon at the end if an id follows. Such keys expire."""


def parse_header(text: str) -> dict[str, str]:
    """Return the declarations in the header of a Lua file."""
    header = _HEADER.match(text)
    return {
        found[1]: re.sub(r"\n--\s+", " ", found[2])
        for found in _DECLARATION.finditer(header[0] if header else "")
    }


def split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_texts() -> tuple[dict[str, str], dict[str, str]]:
    """Return the text of each Lua file, and the feature of each file that belongs to one."""
    texts, owners = {}, {}
    queue = Path(__file__).parent
    for file in queue.glob("lua/*.lua"):
        texts[file.stem] = file.read_text(encoding="utf-8")
    for file in queue.parent.glob("features/*/lua/*.lua"):
        texts[file.stem] = file.read_text(encoding="utf-8")
        owners[file.stem] = file.parts[-3]
    return texts, owners


def _parse_feature(name: str, main_file: str, header: Mapping[str, str]) -> LuaFeature:
    extra, index = header["Extra"].split()
    return LuaFeature(
        name,
        main_file,
        (extra, int(index)),
        _parse_keys(header["Keys"]),
        _parse_keys(header.get("Pool keys", "")),
        header.get("Lane", "").split(),
        header.get("Control", ""),
        {name: int(value) for name, value in map(str.split, split_list(header.get("Constants", "")))},
        [name.removesuffix("<id>") for name in split_list(header.get("Other keys", ""))],
    )


def _parse_keys(text: str) -> dict[str, tuple[str, str]]:
    rows = (declared.split() for declared in split_list(text))
    return {key: (suffix, kind) for key, kind, suffix in rows}


def _parse_features() -> dict[str, LuaFeature]:
    headers = {name: parse_header(text) for name, text in TEXTS.items()}
    found = [
        _parse_feature(header["Feature"], file, header)
        for file, header in headers.items()
        if "Feature" in header
    ]
    return {each.name: each for each in sorted(found, key=lambda each: each.extra[1])}


TEXTS, FEATURE_BY_FILE = _read_texts()
"""Text of all Lua files by name, and the features of those that belong to one. They are read at import,
because the process may lack file descriptors later, and the files may be replaced by others."""
LUA_FEATURES = _parse_features()
"""Features that store something with requests, in the order of their indexes in an entry."""
ALL_FEATURES = tuple(LUA_FEATURES)
FEATURE_KEYS = dict(chain.from_iterable(each.keys.items() for each in LUA_FEATURES.values()))
FEATURE_POOL_KEYS = dict(chain.from_iterable(each.pool_keys.items() for each in LUA_FEATURES.values()))
"""Suffix and type of the keys of all features by name: those of a queue, and those of a pool."""
FEATURE_CONSTANTS = dict(chain.from_iterable(each.constants.items() for each in LUA_FEATURES.values()))
OTHER_KEYS = [name for each in LUA_FEATURES.values() for name in each.other_keys]
