"""Loading and reloading of settings: returns the settings of a file and the environment, or all problems."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from dispatcher.common.duration import parse_duration
from dispatcher.features import import_modules
from dispatcher.settings.model import AdminSettings, PoolSettings, Settings
from dispatcher.settings.queue import QueueSettings, with_derived_names
from dispatcher.settings.small_files import read_regular_file, read_with_timeout
from dispatcher.settings.yaml_source import (
    ENV_PREFIX,
    ENVIRONMENT,
    MAX_BYTES,
    Node,
    Problem,
    overlay_environment,
    read_yaml,
    suggest_nearest,
)

NEEDS_RESTART = ("pool", "queue", "admin", "tracing", "gateway.url")
"""Sections and keys that cannot change while a dispatcher runs. A reload that changes one is rejected."""
PATH_ENDINGS = ("_file", "_dir")
"""Endings of keys whose values are paths."""
PATHS_IN_LISTS: tuple[tuple[str, str], ...] = tuple(
    each for module in import_modules("settings").values() for each in getattr(module, "PATHS_IN_LISTS", ())
)
"""Lists of features, with the keys of their entries whose values are paths."""


@dataclass(frozen=True, slots=True)
class ReloadRejection:
    """Reasons why a new configuration was rejected. Nothing of it is applied."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings that are needed to connect to a queue and to its dispatcher."""

    pool: PoolSettings
    queue: QueueSettings
    admin: AdminSettings


def load_settings(path: Path | str | None, environ: Mapping[str, str]) -> Settings | list[Problem]:
    """Return the settings of a file and the environment, or all problems of both.

    Variables of the environment have precedence. Without a path, only the environment is read.
    """
    text = read_config(path)
    if isinstance(text, Problem):
        return [text]
    return parse_settings(text, environ, name=config_name(path), directory=config_directory(path))


def load_client_settings(
    path: Path | str | None, environ: Mapping[str, str]
) -> tuple[Settings | ClientSettings | None, list[Problem]]:
    """Return the settings and no problems, or the settings that a client needs and the problems of the rest.

    So a client can work with a queue although other sections are wrong. Return `None` and the problems if the
    sections that a client needs are wrong, or the file cannot be read.
    """
    text = read_config(path)
    if isinstance(text, Problem):
        return None, [text]
    name, directory = config_name(path), config_directory(path)
    whole = parse_settings(text, environ, name=name, directory=directory)
    if isinstance(whole, Settings):
        return whole, []
    root, problems = _build_tree(text, environ, name, directory)
    if any(not problem.where for problem in problems):
        return None, whole
    given = {part: node.to_plain() for part, node in root.value.items()}
    try:  # validate these sections alone, because the whole configuration is not valid
        pool = PoolSettings.model_validate(given.get("pool"))
        queue = QueueSettings.model_validate(given.get("queue"))
        admin = AdminSettings.model_validate(given.get("admin"))
    except ValidationError:
        return None, whole
    return ClientSettings(
        pool, _resolve_data_dir(with_derived_names(queue, pool.name), directory), admin
    ), whole


def read_config(path: Path | str | None) -> str | Problem:
    """Return the text of a configuration file. Empty without a path. Blocks for up to READ_TIMEOUT_S."""
    if path is None:
        return ""
    path = Path(path)
    try:
        return read_with_timeout(partial(read_config_blocking, path))
    except TimeoutError as error:
        return unreadable_problem(path, error)


def read_config_blocking(path: Path) -> str | Problem:
    """Return the text of a configuration file. Blocks for as long as the file system hangs."""
    try:
        raw = read_regular_file(path, MAX_BYTES)
    except OSError as error:
        return unreadable_problem(path, error)
    if len(raw) > MAX_BYTES:
        return Problem(path.name, "", f"is larger than {MAX_BYTES // 1024} KiB: not a configuration")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Problem(path.name, "", "is not valid UTF-8", raw.count(b"\n", 0, error.start) + 1)


def unreadable_problem(path: Path, error: OSError) -> Problem:
    """Return the problem of a configuration file that cannot be read."""
    return Problem(str(path), "", f"cannot be read: {error.strerror or error}")


def config_name(path: Path | str | None) -> str:
    """Return the name of a configuration for messages."""
    return ENVIRONMENT if path is None else Path(path).name


def config_directory(path: Path | str | None) -> Path:
    """Return the directory to which relative paths in a file are relative.

    It is the directory of the path as given, because the files of a mounted ConfigMap are links. Without a
    path, or if it is not a regular file, it is the working directory.
    """
    if path is None or not Path(path).is_file():
        return Path.cwd()
    return Path(path).parent.absolute()


def parse_settings(
    text: str, environ: Mapping[str, str], *, name: str = "config.yaml", directory: Path | None = None
) -> Settings | list[Problem]:
    """Return the settings of a text and the environment, or all problems of both.

    `name` is the name of the file for messages. Relative paths in the text are relative to `directory`.
    Relative paths in the environment are relative to the working directory, as in every other program.
    """
    root, problems = _build_tree(text, environ, name, directory)
    if any(not problem.where for problem in problems):
        return problems  # a file that cannot be read has no further problems
    if root.value.get("gateway") is None:
        root.value["gateway"] = Node({}, None)  # then the message names the missing key gateway.url
    try:
        settings = Settings.from_tree(root)
    except ValidationError as error:
        problems += find_problems(error, root, name)
    else:
        if not problems:
            # The model is frozen. Nothing else has a reference to the object yet, so this change is safe.
            object.__setattr__(settings, "queue", _resolve_data_dir(settings.queue, directory))
            return settings
    # The file in the order of its lines, then the environment.
    return sorted(
        problems, key=lambda problem: (problem.source == ENVIRONMENT, problem.line or 0, problem.where)
    )


def find_problems(
    error: ValidationError, root: Node, name: str, model: type[BaseModel] = Settings
) -> list[Problem]:
    """Return the problems of a tree that is not valid for the model, with their places."""
    errors = error.errors(include_url=False, include_input=True)
    return [_to_problem(details, root, name, model) for details in errors]


def _build_tree(
    text: str, environ: Mapping[str, str], name: str, directory: Path | None
) -> tuple[Node, list[Problem]]:
    """Return one tree of file and environment, with absolute paths for the file, and its problems."""
    root, problems = read_yaml(text, name)
    if any(not problem.where for problem in problems):
        return root, problems
    problems += overlay_environment(root, environ, Settings)
    if directory is not None:
        for node in _path_nodes(root):
            if not node.variable and node.value and isinstance(node.value, str):
                node.value = os.path.normpath(directory / node.value)
    return root, problems


def _path_nodes(root: Node) -> Iterator[Node]:
    """Yield the node of each given key whose value is the path of a file or a directory."""
    for path in key_paths(Settings):
        if path.endswith(PATH_ENDINGS) and (node := _find_given(root, path)) is not None:
            yield node
    for name, key in PATHS_IN_LISTS:
        listed = _find_given(root, name)
        if listed is None or listed.variable or not isinstance(listed.value, list):
            continue
        for entry in listed.value:
            if isinstance(entry, Node) and isinstance(entry.value, dict) and key in entry.value:
                yield entry.value[key]


def _find_given(root: Node, path: str) -> Node | None:
    """Return the node of a key, or `None` if neither file nor environment give it."""
    node: Node | None = root
    for part in path.split("."):
        node = node.value.get(part) if node is not None and isinstance(node.value, dict) else None
    return node


def _resolve_data_dir(queue: QueueSettings, directory: Path | None) -> QueueSettings:
    """Make the default data directory relative to the file. It still counts as a default."""
    if directory is None or "data_dir" in queue.model_fields_set:
        return queue
    place = {"data_dir": os.path.normpath(directory / queue.data_dir)}
    return QueueSettings.model_construct(_fields_set=queue.model_fields_set, **{**dict(queue), **place})


def reload_settings(
    old: Settings,
    new_text: str,
    environ: Mapping[str, str],
    *,
    name: str = "config.yaml",
    directory: Path | None = None,
) -> Settings | ReloadRejection:
    """Return the new settings, or why the old ones stay in effect. The caller applies the new settings."""
    new = parse_settings(new_text, environ, name=name, directory=directory)
    if not isinstance(new, Settings):
        return ReloadRejection(tuple(str(problem) for problem in new))
    needs_restart = [
        f"{name}: {path}: needs a restart to change"
        for section in NEEDS_RESTART
        for path in _changed_paths(_value_at(old, section), _value_at(new, section), section)
    ]
    return ReloadRejection(tuple(needs_restart)) if needs_restart else new


def _value_at(settings: Settings, path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _changed_paths(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, BaseModel):
        # A key that neither file gives can differ only because it is derived from another key, which is
        # reported itself.
        for name in (
            name for name in type(old).model_fields if name in old.model_fields_set | new.model_fields_set
        ):
            yield from _changed_paths(getattr(old, name), getattr(new, name), f"{path}.{name}")
    elif old != new:
        yield path


def _to_problem(details: ErrorDetails, root: Node, name: str, model: type[BaseModel]) -> Problem:
    path = [part for part in details["loc"] if part != "[key]"]  # pydantic's mark of a key of a mapping
    message = _error_message(details, path, model)
    node = _find_node(root, path)
    if node is not None and node.variable:
        return Problem(ENVIRONMENT, node.variable + _dotted_path(_from_first_index(path)), message)
    if name == ENVIRONMENT:  # without a file, name the variable that is missing
        return Problem(name, ENV_PREFIX + "__".join(map(str, path)).upper(), message)
    return Problem(name, _dotted_path(path), message, None if node is None else node.line)


def _find_node(root: Node, path: Sequence[str | int]) -> Node | None:
    """Return the node of a path. If the key is missing, return the node of its section."""
    node = root
    for part in path:
        children = node.value
        if node.variable or not isinstance(children, dict | list):
            break
        if isinstance(children, dict) and part in children:
            node = children[str(part)]
        elif isinstance(children, list) and isinstance(part, int) and part < len(children):
            node = children[part]
        else:
            break
    return None if node is root else node


def _from_first_index(path: Sequence[str | int]) -> Sequence[str | int]:
    """Return the path inside a list. A variable always gives a whole list."""
    return path[next((at for at, part in enumerate(path) if isinstance(part, int)), len(path)) :]


def _dotted_path(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


_TYPE_MESSAGES = {
    "float_type": "a number is expected",
    "float_parsing": "a number is expected",
    "int_type": "a whole number is expected",
    "int_from_float": "a whole number is expected",
    "string_type": "a text is expected: put it in quotes",
    "bool_type": "true or false is expected",
    "dict_type": "a map is expected",
    "tuple_type": "a list is expected",
    "model_type": "a section with keys is expected",
    "model_attributes_type": "a section with keys is expected",
    "finite_number": "must be a finite number",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "missing": "is required",
}
_NUMBER_ERRORS = ("float_type", "float_parsing", "int_type", "int_parsing")
_BOUNDS = {
    "greater_than": ("gt", "must be above"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be below"),
    "less_than_equal": ("le", "must be at most"),
}


def _error_message(details: ErrorDetails, path: Sequence[str | int], model: type[BaseModel]) -> str:
    """Return the message for an error of pydantic. It repeats numbers, but no values that may be secrets."""
    kind, context, given = details["type"], details.get("ctx", {}), details["input"]
    if kind == "extra_forbidden":
        return _unknown_key_message(path, model)
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        # A share of 5 was probably meant as 5 %.
        is_percent = kind == "less_than" and context[bound] == 1 and isinstance(given, int | float)
        hint = f" (a share: {given:g}% is {given / 100:g})" if is_percent and 1 < given < 100 else ""
        return f"{words} {context[bound]}, not {str(given)[:20]}{hint}"
    if kind in ("literal_error", "enum"):
        choices = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        if "[key]" in details["loc"]:
            return f"unknown key{suggest_nearest(str(given), choices)}"
        return f"must be one of {', '.join(choices)}{suggest_nearest(str(given), choices)}"
    return _TYPE_MESSAGES.get(kind, details["msg"]) + (
        _number_hint(given, path) if kind in _NUMBER_ERRORS else ""
    )


def _number_hint(given: object, path: Sequence[str | int]) -> str:
    """Return a hint how to write a text with a unit as a number. Empty if the text has no unit."""
    if not isinstance(given, str):
        return ""
    if (share := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", given)) is not None:
        return f" (a share: {float(share[1]):g}% is {float(share[1]) / 100:g})"
    if not str(path[-1]).endswith("_s"):
        return ""
    try:
        return f" (of seconds: {parse_duration(given):g})"
    except ValueError:
        return " (of seconds)"


def _unknown_key_message(path: Sequence[str | int], model: type[BaseModel]) -> str:
    """Return the message about an unknown key. It names a similar key of the section, or else a key with the
    same name in another section."""
    *parents, last = (str(part) for part in path)
    siblings = model
    for parent in parents:
        if parent.isdigit():
            continue  # an index in a list
        kind = siblings.model_fields[parent].annotation
        # The section itself, or the section in a list such as `tuple[ModelSettings, ...]`.
        (kind,) = [each for each in (kind, *get_args(kind)) if isinstance(each, type)][:1]
        siblings = kind
    hint = suggest_nearest(last, siblings.model_fields)
    if not hint:
        same = [path for path in key_paths(model) if path.rpartition(".")[2] == last]
        hint = f" (did you mean {same[0]}?)" if same else ""
    return f"unknown key{hint}"


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the path of every key, such as `gateway.tls.ca_file`, in the order of the documentation."""
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from key_paths(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name
