"""Options that several verbs have, as one parameter of each: a dataclass whose fields are those options.

    def resume(where: QueueOptions, json_output: Json = False) -> None: ...

has --config, --queue-url, --queue and --pool where it says `where`. Typer knows no such parameter, so it is
shown a function that takes the fields one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeGuard, get_type_hints


def unfolded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, called by name with what typer reads; itself where it has no such parameter.

    The options of a dataclass stand where its parameter does, in the order of its fields.
    """
    written = signature(verb, eval_str=True)
    kinds: dict[str, Any] = {each.name: each.annotation for each in written.parameters.values()}
    folded = {name: kind for name, kind in kinds.items() if _is_folded(kind)}
    if not folded:
        return verb

    @wraps(verb)
    def called(**given: Any) -> Any:
        for name, kind in folded.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        return verb(**given)

    shown = [
        option
        for each in written.parameters.values()
        for option in (_options(folded[each.name]) if each.name in folded else [each])
    ]
    by_name = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in shown]
    vars(called)["__signature__"] = written.replace(parameters=by_name)
    called.__annotations__ = {each.name: each.annotation for each in shown}
    return called


def _is_folded(kind: object) -> TypeGuard[type[Any]]:
    return is_dataclass(kind) and isinstance(kind, type)


def _options(kind: type[Any]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(kind)
    ]
