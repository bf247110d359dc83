"""Exceptions that are raised at any step of the loop."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from dispatcher.kernel.completions import Completion, get_lease
from dispatcher.kernel.context import KernelContext


class InjectedError(Exception):
    """Exception that no program expects."""


@dataclass
class Fault:
    """An exception at one method, or function of a module: at call `at_call`, or at all calls about request
    `request_id`."""

    cls: type | ModuleType
    method: str
    at_call: int = 0
    request_id: str = ""
    is_late: bool = False
    """True if the method does its work before it raises the exception."""
    error: type[BaseException] = InjectedError
    is_active: bool = False
    """True while the exception may be raised."""
    call_count: int = 0
    raised_count: int = 0

    def must_raise(self, arguments: tuple[Any, ...]) -> bool:
        if not self.is_active:
            return False
        self.call_count += 1
        if self.request_id:
            return any(map(self._concerns_request, arguments))
        return self.call_count == self.at_call

    def raise_error(self) -> None:
        self.raised_count += 1
        raise self.error(self.method)

    def _concerns_request(self, value: Any) -> bool:
        """Return True if a value is the request, or holds it."""
        if isinstance(value, list | tuple):
            return any(map(self._concerns_request, value))
        if getattr(value, "id", None) == self.request_id or self.request_id == getattr(
            value, "request_id", None
        ):
            return True
        member = getattr(value, "member", b"")
        if isinstance(member, bytes) and b'"id":"%b"' % self.request_id.encode() in member:
            return True
        names = ("request", "entry", "leases", "lease", "settlement", "ended")
        return any(
            self._concerns_request(held) for name in names if (held := getattr(value, name, None)) is not None
        )


@contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Raise `InjectedError` at the steps that the faults name."""
    before = [(fault.cls, fault.method, vars(fault.cls)[fault.method]) for fault in faults]
    try:
        for fault, (cls, name, method) in zip(faults, before, strict=True):
            setattr(cls, name, _wrap(method, fault))
        yield
    finally:
        for cls, name, method in before:
            setattr(cls, name, method)


def _wrap(method: Any, fault: Fault) -> Any:
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def call_async(*arguments: Any, **options: Any) -> Any:
            must_raise = fault.must_raise(arguments)
            answer = await method(*arguments, **options) if fault.is_late or not must_raise else None
            if must_raise:
                fault.raise_error()
            return answer

        return call_async

    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        must_raise = fault.must_raise(arguments)
        answer = method(*arguments, **options) if fault.is_late or not must_raise else None
        if must_raise:
            fault.raise_error()
        return answer

    return call


@contextmanager
def count_completions() -> Iterator[Counter[str]]:
    """Count the completions of each lease, by its token."""
    counts: Counter[str] = Counter()
    complete = KernelContext.complete

    def complete_and_count(context: KernelContext, completion: Completion) -> None:
        counts[get_lease(completion).token] += 1
        complete(context, completion)

    KernelContext.complete = complete_and_count  # type: ignore[method-assign, assignment]
    try:
        yield counts
    finally:
        KernelContext.complete = complete  # type: ignore[method-assign]


def list_methods(cls: type | ModuleType) -> list[str]:
    """Return the names of the methods that a class itself defines, or of the functions of a module."""
    return [
        name
        for name, value in vars(cls).items()
        if inspect.isfunction(value)
        and not name.startswith("__")
        and (isinstance(cls, type) or value.__module__ == cls.__name__)
    ]
