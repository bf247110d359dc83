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


def unfold_options(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of the verb in which each group of options is replaced by the single options.

    The options take the place of their parameter, in the order of the fields. A verb without groups is
    returned as it is.
    """
    written = signature(verb, eval_str=True)
    kinds: dict[str, Any] = {
        parameter.name: parameter.annotation for parameter in written.parameters.values()
    }
    groups = {name: kind for name, kind in kinds.items() if _is_option_group(kind)}
    if not groups:
        return verb

    @wraps(verb)
    def call_verb(**values: Any) -> Any:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return verb(**values)

    parameters = [
        option
        for parameter in written.parameters.values()
        for option in (_list_options(groups[parameter.name]) if parameter.name in groups else [parameter])
    ]
    # Keyword-only: options without a default may then stand behind others that have one.
    by_name = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    # Typer reads both the signature and the annotations.
    vars(call_verb)["__signature__"] = written.replace(parameters=by_name)
    call_verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call_verb


def _is_option_group(kind: object) -> TypeGuard[type[Any]]:
    return is_dataclass(kind) and isinstance(kind, type)


def _list_options(kind: type[Any]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in fields(kind)
    ]
