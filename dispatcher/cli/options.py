"""Groups of options that several verbs share: one parameter, whose type is a dataclass of options.

    def resume(where: QueueOptions, json_output: Json = False) -> None: ...

This verb has --config, --queue-url, --queue and --pool in the place of `where`. Typer does not support such
parameters, so it gets a wrapper that takes the fields one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeGuard, get_type_hints


def unfolded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the verb in which each group of options is replaced by the single options.

    The options take the place of their parameter, in the order of the fields. A verb without groups is
    returned as it is.
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
    # Keyword-only: options without a default may then stand behind others that have one.
    by_name = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in shown]
    # Typer reads both the signature and the annotations.
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
