"""Lua scripts: their text, and their keys and arguments by name.

The scripts are in `queue/lua` and in the folders `lua` of features. The header of each declares what the
script uses and what its caller passes:

    -- Uses: owner_commands, common
    -- Keys: queue, REPLY
    -- Arguments: owner, lease_s: number, is_probe: flag, terms: packed
    -- List leases: id: number, token

`load_script` puts the used files in front of the script, and defines a Lua local for each declared name, so
that positions in KEYS and ARGV are written nowhere. Constants are replaced by their values. A script on the
keys of a queue is built for the features that are present (queue/lua_files.py): their keys come after those
of the queue, and their files after `common`. A file of a feature may declare `-- Hooks` with the scripts to
which it is added, and `-- Columns` with the columns that it adds to a list.

`Script.encode_arguments` puts the values of a call into the same order. A kind says how a value is passed:
`text` (also bytes, and the default), `number`, `flag` (a bool), or `packed` (a structure as MessagePack, or
`None`). `number?` and `text?` can also be `None`. `None` becomes nil, and an empty text for `text?`. A list
has plain values of one kind, or rows with named columns, which are tables in Lua and mappings in Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

import msgspec

from dispatcher.queue import constants
from dispatcher.queue.keys import KERNEL_KEYS
from dispatcher.queue.lua_files import (
    ALL_FEATURES,
    FEATURE_BY_FILE,
    FEATURE_CONSTANTS,
    LUA_FEATURES,
    TEXTS,
    LuaFeature,
    parse_header,
    split_list,
)

Argument = str | bytes | int | float
NO_NAMES: Mapping[str, Any] = {}
"""Keys or arguments of a script that declares none."""

_LUA = TEXTS
_CAPITAL_NAMES = re.compile(r"\b[A-Z][A-Z_]+\b")
_NAME_IN_CODE = re.compile(rf"'[^'\n]*'|--.*|{_CAPITAL_NAMES.pattern}")
"""Names in code. Strings and comments match as a whole, so that names in them are not found."""
_COMMENT = re.compile(r"--.*")
_KEY_GROUPS = {"queue": KERNEL_KEYS, **{name: each.pool_keys for name, each in LUA_FEATURES.items()}}
"""Groups of keys that a script declares by one word: those of a queue and its pool, to which the features add
theirs, and the pool keys of a feature."""

_pack = msgspec.msgpack.Encoder().encode
_LUA_READERS = {
    "text": "{0}",
    "number": "tonumber({0})",
    "flag": "{0} == '1'",
    "packed": "({0} ~= '' and cmsgpack.unpack({0}) or nil)",
    "text?": "{0}",
    "number?": "tonumber({0})",
}
"""Lua expressions that read an argument of each kind."""
_ENCODERS: Mapping[str, Callable[[Any], Argument]] = {
    "flag": int,
    "packed": lambda value: b"" if value is None else _pack(value),
    "text?": lambda value: "" if value is None else value,
    "number?": lambda value: "" if value is None else value,
}
"""Encoders of the kinds whose values are not passed as they are."""

Columns = Sequence[tuple[str, str]]
"""Name and kind of each argument, or of each column of a list."""


@dataclass
class ListArgument:
    """List among the arguments of a script."""

    name: str
    columns: Columns
    is_plain: bool
    """True if the list has values instead of rows."""

    def __post_init__(self) -> None:
        self._names = [name for name, _ in self.columns]
        self._get_values = _make_getter(self._names)
        self._encoders = _select_encoders(self.columns)

    def encode(self, rows: Sequence[Any]) -> list[Argument]:
        """Return the rows as arguments, after their number."""
        values: list[Argument] = [len(rows)]
        if self.is_plain:
            values += rows
        elif rows:
            # Rows may have further columns, for features that are not present.
            _check_names(rows[0].keys() & {*self._names}, self._names)
            for row in rows:
                values += self._get_values(row)
            for first, encode in self._encoders:
                for at in range(1 + first, len(values), len(self.columns)):
                    values[at] = encode(values[at])
        return values

    def to_lua(self) -> str:
        """Return the code that reads the list. `LIST_START` is the position of its length."""
        width = len(self.columns)
        readers = [
            f"{name} = {_LUA_READERS[kind].format(f'ARGV[at + {offset}]')}"
            for offset, (name, kind) in enumerate(self.columns)
        ]
        row = readers[0].partition(" = ")[2] if self.is_plain else f"{{{', '.join(readers)}}}"
        return (
            f"local {self.name} = {{}}\n"
            f"for row = 1, tonumber(ARGV[LIST_START]) do\n"
            f"local at = LIST_START + 1 + (row - 1) * {width}\n"
            f"{self.name}[row] = {row}\n"
            f"end\n"
            f"LIST_START = LIST_START + 1 + #{self.name} * {width}\n"
        )


@dataclass
class Script:
    """Script with everything it uses."""

    text: str
    sha: str
    key_group: str
    """Group of keys that come first. Empty if there is none."""
    key_names: Sequence[str]
    """Names of the other keys."""
    arguments: Columns
    lists: Sequence[ListArgument]

    def __post_init__(self) -> None:
        self._encoders = _select_encoders(self.arguments)
        self._names = [name for name, _ in self.arguments]
        self._get_values = _make_getter(self._names)

    def encode_keys(self, group: Sequence[Argument], keys: Mapping[str, Argument]) -> list[Argument]:
        if len(keys) != len(self.key_names):
            _check_names(keys, self.key_names)
        return [*group, *[keys[name] for name in self.key_names]]

    def encode_arguments(self, values: Mapping[str, Any]) -> list[Argument]:
        """Return the values of a call in the order in which the script reads them."""
        if len(values) != len(self.arguments) + len(self.lists):
            _check_names(values, [*self._names, *(each.name for each in self.lists)])
        encoded = [*self._get_values(values)]
        for at, encode in self._encoders:
            encoded[at] = encode(encoded[at])
        for each in self.lists:
            encoded += each.encode(values[each.name])
        return encoded


@cache
def load_script(name: str, features: Sequence[str] = ALL_FEATURES) -> Script:
    """Return a script, built for these features. It is built on first use, because a client runs few of the
    scripts.

    The script itself becomes a function after the files that it uses, so each of the two may have 200 locals.
    """
    if FEATURE_BY_FILE.get(name) in LUA_FEATURES.keys() - {*features}:
        raise ValueError(f"{name}.lua belongs to a feature that is not present")
    declared = parse_header(_LUA[name])
    key_names = [name for name in split_list(declared.get("Keys", "")) if name != "none"]
    group = key_names.pop(0) if key_names and key_names[0] in _KEY_GROUPS else ""
    arguments = _parse_columns(declared.get("Arguments", ""))
    used = _collect_used(name, features)
    lists = [
        _parse_list(kind.removeprefix("List "), columns, used)
        for kind, columns in declared.items()
        if kind.startswith("List ")
    ]
    texts = _join_texts(used, FEATURE_BY_FILE.get(name, ""))
    body = "\n".join(["return (function()", _read_arguments(arguments, lists), _LUA[name], "end)()"])
    present = [LUA_FEATURES[feature] for feature in features] if group == "queue" else []
    text = _define_names(f"{texts}\n{body}", group, key_names, present)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(text, sha, group, key_names, arguments, lists)


def get_feature_columns(list_name: str) -> dict[str, Any]:
    """Return the columns that features add to a list, with the values for a row that is about no feature."""
    columns = chain.from_iterable(
        _parse_columns(parse_header(text).get(f"Columns {list_name}", "")) for text in _LUA.values()
    )
    return {name: None if kind == "packed" else b"" for name, kind in columns}


def _parse_columns(text: str) -> Columns:
    parts = (part.partition(":") for part in split_list(text))
    return [(name.strip(), kind.strip() or "text") for name, _, kind in parts]


def _parse_list(name: str, text: str, used: Sequence[str]) -> ListArgument:
    columns = [*_parse_columns(text)]
    if len(columns) == 1 and columns[0][0] in _LUA_READERS:
        return ListArgument(name, [("value", columns[0][0])], is_plain=True)
    for file in used:
        columns += _parse_columns(parse_header(_LUA[file]).get(f"Columns {name}", ""))
    return ListArgument(name, columns, is_plain=False)


def _collect_used(name: str, features: Sequence[str]) -> list[str]:
    """Return the files that a script uses. Each comes after those that it uses itself, because it needs their
    local functions."""
    found: list[str] = []

    def add(part: str) -> None:
        if part in found:
            return
        add_used_by(part)
        found.append(part)
        if part == "common":
            found.extend(LUA_FEATURES[feature].main_file for feature in features)

    def add_used_by(part: str) -> None:
        for used in split_list(parse_header(_LUA[part]).get("Uses", "")):
            add(used)

    add_used_by(name)
    for file, feature in FEATURE_BY_FILE.items():
        if feature in features and name in split_list(parse_header(_LUA[file]).get("Hooks", "")):
            add(file)
    return found


def _join_texts(used: Sequence[str], own_feature: str) -> str:
    """Return the texts of the used files, those of features last, except for the main files. The locals of
    the files of a feature end with them, because a script may have 200, unless the script is one of the
    feature itself."""
    main_files = [each.main_file for each in LUA_FEATURES.values()]
    parts, by_feature = [], dict[str, list[str]]()
    for file in used:
        if file in main_files:
            parts.append(f"do\n{_LUA[file]}end")
        elif file in FEATURE_BY_FILE:
            by_feature.setdefault(FEATURE_BY_FILE[file], []).append(_LUA[file])
        else:
            parts.append(_LUA[file])
    for feature, texts in by_feature.items():
        text = "\n".join(texts)
        parts.append(text if feature == own_feature else f"do\n{text}end")
    return "\n".join(parts)


def _define_names(text: str, group: str, key_names: Sequence[str], features: Sequence[LuaFeature]) -> str:
    """Return a script after the definitions that it shares with Python: keys as Lua locals, and constants by
    their values. Only the keys that the script uses, and neither constants nor keys of features, because a
    script may have 200 locals."""
    keys = dict(_KEY_GROUPS.get(group, {}))
    kernel_keys = [*keys]
    values: dict[str, object] = {
        **constants.LUA_CONSTANTS,
        **FEATURE_CONSTANTS,
        "KERNEL_KEY_COUNT": len(keys),
        "LAST_EXTRA": max((each.extra[1] for each in LUA_FEATURES.values()), default=0),
    }
    tables = []
    for each in features:
        first = len(keys) + 1
        keys |= each.keys
        values |= {key: f"KEYS[{number}]" for number, key in enumerate(each.keys, first)}
        values |= dict([each.extra])
        tables.append(_describe_feature(each, first, values))
    values["FEATURES"] = f"{{{', '.join(tables)}}}"
    text = _NAME_IN_CODE.sub(lambda found: str(values.get(found[0], found[0])), text)
    numbers = {key: number for number, key in enumerate(kernel_keys, 1)}
    numbers |= {key: number for number, key in enumerate(key_names, 1 + len(keys))}
    definitions = {
        **{key: f"KEYS[{number}]" for key, number in numbers.items()},
        "KEY_TYPES": f"{{{', '.join(repr(kind) for _, kind in keys.values())}}}",
    }
    used = set(_CAPITAL_NAMES.findall(_COMMENT.sub("", text)))
    lines = [f"local {name} = {value}" for name, value in definitions.items() if name in used]
    return "\n".join([*lines, text])


def _describe_feature(feature: LuaFeature, first_key: int, values: Mapping[str, object]) -> str:
    """Return the table of a feature for common.lua."""
    parts = [
        f"name = '{feature.name}', first_key = {first_key}, last_key = {first_key + len(feature.keys) - 1}"
    ]
    if feature.control:
        parts.append(f"control = '{feature.control}'")
    if feature.lane:
        key, letter, *words = feature.lane
        is_closed = str("closed" in words).lower()
        parts.append(f"lane = {{set = {values[key]}, letter = '{letter}', closed = {is_closed}}}")
    return f"{{{', '.join(parts)}}}"


def _read_arguments(arguments: Columns, lists: Sequence[ListArgument]) -> str:
    """Return the Lua code that defines a local for each argument and each list."""
    parts = []
    if arguments:
        names = ", ".join(name for name, _ in arguments)
        readers = (
            _LUA_READERS[kind].format(f"ARGV[{number}]") for number, (_, kind) in enumerate(arguments, 1)
        )
        parts.append(f"local {names} = {', '.join(readers)}\n")
    if lists:
        parts.append(f"local LIST_START = {len(arguments) + 1}\n")
    return "".join([*parts, *(each.to_lua() for each in lists)])


def _select_encoders(columns: Columns) -> list[tuple[int, Callable[[Any], Argument]]]:
    """Return the encoders of the columns that need one, with the positions of these columns."""
    return [(at, _ENCODERS[kind]) for at, (_, kind) in enumerate(columns) if kind in _ENCODERS]


def _make_getter(names: Sequence[str]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """Return a function that returns the values of these names."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: [values[name] for name in names]


def _check_names(given: Iterable[str], declared: Sequence[str]) -> None:
    if set(given) != set(declared):
        raise TypeError(f"the script declares {sorted(declared)}, and the call has {sorted(given)}")
