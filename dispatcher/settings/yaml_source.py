"""Sources of settings: reads a YAML text and environment variables into one tree of nodes with line numbers.

Only plain YAML is accepted: one document of mappings, lists and scalars, with the scalars of YAML 1.2 (`no`
is a word, `1e-3` is a number). Anchors, tags and duplicate keys are rejected. Nothing here recurses over the
input, and no content of a file raises an exception.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from dispatcher.settings.values import SecretUrl

ENVIRONMENT = "environment"
ENV_PREFIX = "BATCH_DISPATCHER__"
MAX_BYTES = 256 * 1024
"""Largest size of a configuration. Usual ones have a few kilobytes, so a larger file is probably no
configuration."""
MAX_DEPTH = 16
MAX_EVENTS = 12_000
"""Largest number of keys, values and brackets. A configuration with all keys has some hundreds of them, and
six more for each of up to a thousand models."""

# The parser in C, if PyYAML was built with it.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
# The words of YAML 1.2. In YAML 1.1, `yes`, `no`, `on` and `off` are booleans, too.
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", "+.inf", ".Inf"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Problem of a configuration, with its place. Never contains a value that may be a secret."""

    source: str
    """Name of the file, or `environment`."""
    where: str
    """Path of the key (`budget.reserve`), or name of the variable. Empty if the whole source is concerned."""
    what: str
    """End of a sentence that begins with the place."""
    line: int | None = None

    def __str__(self) -> str:
        line = f"line {self.line}" if self.line is not None else ""
        return ": ".join(part for part in (self.source, line, self.where, self.what) if part)


@dataclass(slots=True)
class Node:
    """Value in the tree, with its line."""

    value: Any
    """Scalar, `dict[str, Node]` or `list[Node]`."""
    line: int | None
    variable: str = ""
    """Environment variable of the value, or empty if it is from the file."""

    def to_plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.to_plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.to_plain() for node in self.value]
        return self.value


class _RefusedError(Exception):
    def __init__(self, what: str, line: int | None) -> None:
        super().__init__(what)
        self.what = what
        self.line = line


def suggest_nearest(name: str, known: Iterable[str]) -> str:
    """Return the text ` (did you mean …?)` with the most similar known name, or an empty text."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def read_yaml(text: str, name: str) -> tuple[Node, list[Problem]]:
    """Return the tree of a YAML text, and its problems. If a problem has no `where`, the tree is empty."""
    empty = Node({}, None)
    fault: Problem
    try:
        if len(text.encode()) > MAX_BYTES:
            return empty, [Problem(name, "", f"is larger than {MAX_BYTES // 1024} KiB: not a configuration")]
        builder = _Builder(name)
        root = builder.build_tree(yaml.parse(text, Loader=_Loader))
    except _RefusedError as refused:
        fault = Problem(name, "", refused.what, refused.line)
    except yaml.reader.ReaderError:
        fault = Problem(name, "", "holds characters that YAML does not allow (control characters)")
    except yaml.YAMLError as error:
        fault = _syntax_problem(error, text, name)
    except UnicodeEncodeError:
        fault = Problem(name, "", "is not valid Unicode")
    else:
        if root.value is None:
            root = Node({}, None)
        if isinstance(root.value, dict):
            return root, builder.problems
        fault = Problem(name, "", "must be a mapping of sections, such as `gateway:`", root.line)
    return empty, [fault]


def _syntax_problem(error: yaml.YAMLError, text: str, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or "cannot be read"
    line = None if mark is None else mark.line + 1
    lines = text.splitlines()
    if line is not None and line <= len(lines) and re.match(r" *\t", lines[line - 1]):
        what = "indented with a tab; use spaces"
    return Problem(name, "", f"is not valid YAML: {what}", line)


@dataclass(slots=True)
class _Builder:
    """Builder of the tree from parse events. It uses an explicit stack instead of recursion."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    _open: list[tuple[Node, str]] = field(default_factory=list)
    """Open collections, each with its path."""
    _key: tuple[str, int] | None = None
    """Key that waits for its value in the current mapping, with its line."""
    _keys: list[tuple[str, int] | None] = field(default_factory=list)
    _root: Node = field(default_factory=lambda: Node(None, None))
    _documents: int = 0

    def build_tree(self, events: Iterator[Any]) -> Node:
        for number, event in enumerate(events):
            line = event.start_mark.line + 1
            if number > MAX_EVENTS:
                raise _RefusedError("holds too many values: not a configuration", line)
            if isinstance(event, yaml.DocumentStartEvent):
                self._documents += 1
                if self._documents > 1:
                    raise _RefusedError("must be one document: take out the `---`", line)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._open.pop()
                self._key = self._keys.pop()
            elif isinstance(event, yaml.NodeEvent):
                self._add_event(event, line)
        return self._root

    def _add_event(self, event: Any, line: int) -> None:
        if event.anchor is not None:
            raise _RefusedError("anchors and aliases are not supported: write the value out", line)
        if event.tag not in (None, "!"):
            raise _RefusedError("tags are not supported", line)
        inside = self._open[-1][0].value if self._open else None
        if isinstance(inside, dict) and self._key is None:  # this event is the next key of the mapping
            if not isinstance(event, yaml.ScalarEvent):
                raise _RefusedError("a key must be a plain name", line)
            self._key = (event.value, line)
            return
        if isinstance(event, yaml.ScalarEvent):
            node = Node(_scalar_value(event), line)
        else:
            node = Node({} if isinstance(event, yaml.MappingStartEvent) else [], line)
        path = self._place_node(node)
        if not isinstance(event, yaml.ScalarEvent):
            if len(self._open) == MAX_DEPTH:
                raise _RefusedError("nests too deep", line)
            self._open.append((node, path))
            self._keys.append(None)

    def _place_node(self, node: Node) -> str:
        """Insert a node into its parent, and return its path."""
        if not self._open:
            self._root = node
            return ""
        parent, path = self._open[-1]
        if isinstance(parent.value, list):
            parent.value.append(node)
            return f"{path}[{len(parent.value) - 1}]"
        assert self._key is not None  # noqa: S101 -- _node handed the key over
        key, line = self._key
        self._key = None
        path = f"{path}.{key}" if path else key
        if key in parent.value:  # go on, so that all duplicate keys are reported at once
            first = parent.value[key].line
            self.problems.append(Problem(self.name, path, f"is given twice (first in line {first})", line))
        else:
            node.line = line  # the line of the key, because the value of a block begins below it
            parent.value[key] = node
        return path


def _scalar_value(event: yaml.ScalarEvent) -> Any:
    return resolve_scalar(event.value) if event.implicit[0] else event.value


def resolve_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar in YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    except ValueError:  # Python converts at most 4300 digits (sys.set_int_max_str_digits)
        return text
    return text


def overlay_environment(root: Node, environ: Mapping[str, str], model: type[BaseModel]) -> list[Problem]:
    """Write the variables with the prefix over the tree. Return the problems of those that match no key."""
    known = dict(_known_variables(model))
    problems = []
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX)):
        key = known.get(variable)
        if key is None:
            sections = [name for name in known if name.startswith(variable + "__")]
            maps = [name for name, (_, many) in known.items() if many and variable.startswith(name + "__")]
            if sections:
                what = f"is a section; set its keys, such as {sections[0]}"
            elif maps:
                what = f'is inside a map; set it whole, as JSON: {maps[0]}={{"name": "value"}}'
            else:
                # Compare without the common prefix, which would make all names similar to each other.
                near = suggest_nearest(
                    variable.removeprefix(ENV_PREFIX), (name.removeprefix(ENV_PREFIX) for name in known)
                )
                what = f"unknown key{near.replace('mean ', f'mean {ENV_PREFIX}')}"
            problems.append(Problem(ENVIRONMENT, variable, what))
            continue
        path, text = key
        node = Node(environ[variable], None) if text is None else _read_value(environ[variable])
        if node is None:
            what = "cannot be read: give a number, true, false, null, or JSON for a list or a map"
            problems.append(Problem(ENVIRONMENT, variable, what))
            continue
        node.variable = variable
        _set_value(root, path, node)
    return problems


def _read_value(text: str) -> Node | None:
    """Return the node for a variable whose value is not plain text, or `None` if it cannot be read."""
    # The text is put into a mapping, so that scalars, lists and maps are parsed in the same way.
    tree, problems = read_yaml(f"value: {text}", ENVIRONMENT)
    return None if problems or len(tree.value) != 1 else tree.value["value"]


_Key = tuple[tuple[str, ...], bool | None]
"""Path of a key, and how the text of its variable is read: as plain text (`None`), as YAML (`False`), or as a
map in YAML (`True`)."""


def _known_variables(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, _Key]]:
    for name, info in model.model_fields.items():
        here = (*path, name)
        kind: Any = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _known_variables(kind, here)
            continue
        choices = get_args(kind)
        text = kind in (str, SecretUrl) or (
            bool(choices) and all(isinstance(choice, str) for choice in choices)
        )
        many = getattr(kind, "__origin__", None) is dict
        yield ENV_PREFIX + "__".join(here).upper(), (here, None if text else many)


class TreeSource(PydanticBaseSettingsSource):
    """Source for pydantic-settings that returns the values of a tree.

    pydantic-settings creates its sources itself, so the tree is passed in a context variable.
    """

    _tree: ContextVar[Node | None] = ContextVar("tree", default=None)

    def __init__(self, settings_cls: type[BaseSettings]) -> None:
        super().__init__(settings_cls)
        tree = self._tree.get()
        self._values: dict[str, Any] = {} if tree is None else tree.to_plain()

    @classmethod
    @contextmanager
    def use_tree(cls, tree: Node) -> Iterator[None]:
        """Use this tree for all settings that are made inside the block."""
        before = cls._tree.set(tree)
        try:
            yield
        finally:
            cls._tree.reset(before)

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values  # includes unknown keys, so that the model reports them


# With PYDANTIC_SETTINGS_DEBUG set, the library logs the values of all sources, including passwords.
logging.getLogger("pydantic_settings").disabled = True


def _set_value(root: Node, path: tuple[str, ...], value: Node) -> None:
    node = root
    for name in path[:-1]:
        child = node.value.get(name)
        if child is None or not isinstance(child.value, dict):
            if child is not None and child.value is not None:
                return  # the file has no section there, which validation reports
            child = node.value[name] = Node({}, None if child is None else child.line)
        node = child
    node.value[path[-1]] = value
