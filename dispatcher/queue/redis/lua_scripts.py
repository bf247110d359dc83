"""Lua scripts: their text, and their keys and arguments by name.

The header of each script in `queue/lua` declares what the script uses and what its caller passes:

    -- Uses: owner_commands, common
    -- Keys: queue, REPLY
    -- Arguments: owner, lease_s: number, is_probe: flag, terms: packed
    -- List leases: id: number, token

`load_script` puts the used files in front of the script, and defines a Lua local for each declared name, so
that positions in KEYS and ARGV are written nowhere. Constants are replaced by their values.
`Script.encode_arguments` puts the values of a call into the same order. A kind says how a value is passed:
`text` (also bytes, and the default), `number`, `flag` (a bool), or `packed` (a structure as MessagePack, or
`None`). `number?` and `text?` can also be `None`. `None` becomes nil, and an empty text for `text?`. A list
has plain values of one kind, or rows with named columns, which are tables in Lua and `Row`s in Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from operator import itemgetter
from typing import Any

import msgspec
from msgspec.structs import astuple

from dispatcher.queue import constants
from dispatcher.queue.keys import (
    MODEL_REGISTRY_KEYS,
    PROGRESS_KEYS,
    SCRIPT_KEYS,
    SEQUENCE_KEYS,
    WAITING_FOR_MODEL_KEYS,
)

Argument = str | bytes | int | float
NO_NAMES: Mapping[str, Any] = {}
"""Keys or arguments of a script that declares none."""

_FOLDER = files("dispatcher.queue") / "lua"
_LUA = {
    file.name.removesuffix(".lua"): file.read_text(encoding="utf-8")
    for file in _FOLDER.iterdir()
    if file.name.endswith(".lua")
}
"""Text of all Lua files. They are read at import, because the process may lack file descriptors later, and
the files may be replaced by those of another version."""
_HEADER = re.compile(r"(?:--[^\n]*\n)+")
_DECLARATION = re.compile(r"^-- (Uses|Keys|Arguments|List (\w+)): (.*(?:\n--   .*)*)", re.MULTILINE)
"""Declaration in a header. Its further lines are indented."""
_CAPITAL_NAMES = re.compile(r"\b[A-Z][A-Z_]+\b")
_NAME_IN_CODE = re.compile(rf"'[^'\n]*'|--.*|{_CAPITAL_NAMES.pattern}")
"""Names in code. Strings and comments match as a whole, so that names in them are not found."""
_COMMENT = re.compile(r"--.*")
_KEY_GROUPS = {"queue": SCRIPT_KEYS, "models": MODEL_REGISTRY_KEYS}
"""Groups of keys that a script declares by one word: those of a queue and its pool, and those of the model
registry."""

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


class Row(msgspec.Struct, kw_only=True):
    """Row of a list. Its fields are the columns that the script declares, in the same order."""


@dataclass
class ListArgument:
    """List among the arguments of a script."""

    name: str
    columns: Columns
    is_plain: bool
    """True if the list has values instead of rows."""

    def __post_init__(self) -> None:
        self._names = tuple(name for name, _ in self.columns)
        self._encoders = _select_encoders(self.columns)

    def encode(self, rows: Sequence[Any]) -> list[Argument]:
        """Return the rows as arguments, after their number."""
        values: list[Argument] = [len(rows)]
        if self.is_plain:
            values += rows
        elif rows:
            _check_names(rows[0].__struct_fields__, self._names)
            for row in rows:
                values += astuple(row)
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
        self._get_values = itemgetter(*self._names) if len(self._names) > 1 else self._get_single_value

    def _get_single_value(self, values: Mapping[str, Any]) -> Sequence[Any]:
        return [values[name] for name in self._names]

    def encode_keys(self, group: Sequence[Argument], keys: Mapping[str, Argument]) -> list[Argument]:
        if len(keys) != len(self.key_names):
            _check_names(sorted(keys), sorted(self.key_names))
        return [*group, *[keys[name] for name in self.key_names]]

    def encode_arguments(self, values: Mapping[str, Any]) -> list[Argument]:
        """Return the values of a call in the order in which the script reads them."""
        if len(values) != len(self.arguments) + len(self.lists):
            _check_names(sorted(values), sorted([*self._names, *(each.name for each in self.lists)]))
        encoded = [*self._get_values(values)]
        for at, encode in self._encoders:
            encoded[at] = encode(encoded[at])
        for each in self.lists:
            encoded += each.encode(values[each.name])
        return encoded


@cache
def load_script(name: str) -> Script:
    """Return a script. It is built on first use, because a client runs few of the scripts.

    The script itself becomes a function after the files that it uses, so each of the two may have 200 locals.
    """
    declared = _parse_header(name)
    key_names = [name for name in _split(declared.get("Keys", "")) if name != "none"]
    group = key_names.pop(0) if key_names and key_names[0] in _KEY_GROUPS else ""
    arguments = _parse_columns(declared.get("Arguments", ""))
    lists = [
        _parse_list(kind.removeprefix("List "), columns)
        for kind, columns in declared.items()
        if kind.startswith("List ")
    ]
    used = "\n".join(_LUA[part] for part in _collect_used(name))
    body = "\n".join(["return (function()", _read_arguments(arguments, lists), _LUA[name], "end)()"])
    text = _define_names(f"{used}\n{body}", group, key_names)
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(text, sha, group, key_names, arguments, lists)


def _parse_header(name: str) -> dict[str, str]:
    """Return the declarations in the header of a Lua file."""
    header = _HEADER.match(_LUA[name])
    return {
        found[1]: re.sub(r"\n--\s+", " ", found[3])
        for found in _DECLARATION.finditer(header[0] if header else "")
    }


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _parse_columns(text: str) -> Columns:
    parts = (part.partition(":") for part in _split(text))
    return [(name.strip(), kind.strip() or "text") for name, _, kind in parts]


def _parse_list(name: str, text: str) -> ListArgument:
    columns = _parse_columns(text)
    if len(columns) == 1 and columns[0][0] in _LUA_READERS:
        return ListArgument(name, [("value", columns[0][0])], is_plain=True)
    return ListArgument(name, columns, is_plain=False)


def _collect_used(name: str) -> list[str]:
    """Return the files that a file uses. Each comes after those that it uses itself, because it needs their
    local functions."""
    found: list[str] = []
    for part in _split(_parse_header(name).get("Uses", "")):
        found += [each for each in (*_collect_used(part), part) if each not in found]
    return found


def _define_names(text: str, group: str, key_names: Sequence[str]) -> str:
    """Return a script after the definitions that it shares with Python: keys as Lua locals, and constants by
    their values. Only the keys that the script uses, and no constant, because a script may have 200
    locals."""
    keys = _KEY_GROUPS.get(group, {})
    progress_start = len(SCRIPT_KEYS) - len(PROGRESS_KEYS)
    waiting_for_model_start = progress_start - len(WAITING_FOR_MODEL_KEYS)
    values = {
        **constants.LUA_CONSTANTS,
        "KEY_COUNT": len(keys),
        "WAITING_FOR_MODEL_START": waiting_for_model_start,
        "PROGRESS_START": progress_start,
        "COMMON_KEY_COUNT": waiting_for_model_start - len(SEQUENCE_KEYS),
    }
    text = _NAME_IN_CODE.sub(lambda found: str(values.get(found[0], found[0])), text)
    definitions = {
        **{key: f"KEYS[{number}]" for number, key in enumerate((*keys, *key_names), 1)},
        "KEY_TYPES": f"{{{', '.join(repr(kind) for _, kind in keys.values())}}}",
    }
    used = set(_CAPITAL_NAMES.findall(_COMMENT.sub("", text)))
    lines = [f"local {name} = {value}" for name, value in definitions.items() if name in used]
    return "\n".join([*lines, text])


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


def _check_names(given: Sequence[str], declared: Sequence[str]) -> None:
    if given != declared:
        raise TypeError(f"the script declares {declared}, and the call has {given}")
