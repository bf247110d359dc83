"""Decorator `batched`: callers pass single items, and a function that is faster on many gets them together.

@batched(max_size=64)
async def embed(texts: list[str]) -> list[Vector]: ...

vector = await embed("hello")
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import update_wrapper
from math import inf
from typing import Any, Generic, Literal, Never, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from dispatcher.batched.async_functions import AsyncWaiters
from dispatcher.batched.stages import HOOK_NAMES, find_hooks
from dispatcher.batched.sync_functions import FunctionWorker, ThreadWaiters, Worker
from dispatcher.batched.waiting import CallTerms
from dispatcher.common.grouping import GroupingRule

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
T_contra = TypeVar("T_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


_BOUNDS: dict[str, tuple[int, int]] = {
    "max_size": (1, 10_000),
    "timeout_s": (0, 60),
    "preferred_sizes": (1, 10_000),
    "max_waiting": (1, 1_000_000),
    "concurrency": (1, 1_000),
    "workers": (1, 64),
}
"""Smallest and largest value of each number that `batched` accepts. A value outside is a slip, such as
milliseconds in place of seconds."""


class Steps(Protocol[T_contra, R_co]):
    """Class that `batched` accepts: each item is prepared, all run together, and each result is finished."""

    @property
    def preprocess(self) -> Callable[[T_contra], Any]:
        """Method that returns the input of `transform` for one item."""

    def transform(self, items: list[Any], /) -> Sequence[Any]:
        """Return the results of many items."""

    @property
    def postprocess(self) -> Callable[[Any], R_co] | Callable[[Any, Any], R_co]:
        """Method that returns the caller's result for one result of `transform`, or for the input of
        `transform` and its result."""


class ListSteps(Protocol[T, R_co]):
    """Class that `batched(batch_hooks=True)` accepts: the hooks take and return lists."""

    @property
    def preprocess(self) -> Callable[[list[T]], Sequence[Any]]:
        """Method that returns the input of `transform` for each item."""

    def transform(self, items: list[Any], /) -> Sequence[Any]:
        """Return the results of many items."""

    @property
    def postprocess(
        self,
    ) -> Callable[[list[Any]], Sequence[R_co]] | Callable[[list[Any], list[Any]], Sequence[R_co]]:
        """Method that returns the results of the callers for those of `transform`, or for the inputs of
        `transform` and its results."""


class Transform(Protocol[T, R_co]):
    """Class with `transform` only."""

    def transform(self, items: list[T], /) -> Sequence[R_co]:
        """Return the results of many items."""


def _pass_on(item: T) -> T:
    return item


class Batched(Generic[T, R]):
    """Result of `batched` for a function: `await it(item)`, or `it.sync(item)` if no event loop runs.

    Any number of tasks, loops and threads may call it, each with one item. A caller that is cancelled, or
    gives up after its timeout, does not affect the others. `async with` and `with` close it at their end. For
    a class they begin when its worker is ready, and raise what prevents that.
    """

    def __init__(
        self,
        name: str,
        waiters: AsyncWaiters[Any, R] | ThreadWaiters[Any, R],
        pack: Callable[[T], Any] = _pass_on,
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self._waiters = waiters
        self._pack_item = pack

    def __repr__(self) -> str:
        return f"<Batched {self.__qualname__}: {self.waiting} wait, {self.running} calls run>"

    @property
    def waiting(self) -> int:
        """Number of items that wait for their call."""
        return len(self._waiters)

    @property
    def running(self) -> int:
        """Number of calls that run."""
        return self._waiters.running_calls

    async def __call__(self, item: T) -> R:
        """Return the result of this item, or raise the exception that it has instead."""
        return await self._waiters.wait_for_result(self._pack_item(item))

    def sync(self, item: T, *, timeout: float | None = None) -> R:
        """Block until this item has a result, and return it. For threads. Raises TimeoutError after `timeout`
        seconds."""
        if _is_loop_running():
            raise RuntimeError(
                f"an event loop runs here, which this would block: await {self.__name__}(item)"
            )
        return self._waiters.wait_for_result_in_thread(self._pack_item(item), timeout)

    async def aclose(self) -> None:
        """Accept no further item, wait until all waiting items have been answered, and end threads and
        processes."""
        self._waiters.close()
        if isinstance(self._waiters, AsyncWaiters):
            await self._waiters.wait_until_ended()
        else:
            await asyncio.to_thread(self._waiters.wait_until_ended)

    def close(self) -> None:
        """Close like `aclose`, but block. For threads."""
        self._waiters.close()
        if isinstance(self._waiters, AsyncWaiters):
            self._waiters.wait_until_ended_in_thread()
        else:
            self._waiters.wait_until_ended()

    async def __aenter__(self) -> Batched[T, R]:
        if isinstance(self._waiters, ThreadWaiters):
            try:
                await asyncio.gather(*map(asyncio.wrap_future, self._waiters.start_workers()))
            except BaseException:
                await self.aclose()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __enter__(self) -> Batched[T, R]:
        if isinstance(self._waiters, ThreadWaiters):
            try:
                for each in self._waiters.start_workers():
                    each.result()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _InstanceEntry:
    """The `Batched` of one instance, stored in the instance's `__dict__`. A copy of the instance does not get
    it."""

    def __init__(self, instance: object, made: Any) -> None:
        self.instance = instance
        self.made = made

    def __reduce__(self) -> tuple[type[_InstanceEntry], tuple[None, None]]:
        return _InstanceEntry, (None, None)


class BatchedMethod(Generic[S, T, R]):
    """Result of `batched` for a method: each instance has its own `Batched` under this name."""

    def __init__(self, function: Callable[[S, list[T]], Any], options: _BatchedOptions) -> None:
        update_wrapper(self, function)  # type: ignore[arg-type]
        self._function = function
        self._options = options
        self._name = function.__name__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> BatchedMethod[S, T, R]: ...
    @overload
    def __get__(self, instance: S, owner: type) -> Batched[T, R]: ...
    def __get__(self, instance: S | None, owner: type) -> BatchedMethod[S, T, R] | Batched[T, R]:
        if instance is None:
            return self
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"{owner.__qualname__} has __slots__: {self._name} needs a __dict__ to be kept in"
            )
        kept: _InstanceEntry | None = instance.__dict__.get(self._name)
        # A copied instance has the entry of its original in its `__dict__`, which must not be used.
        if kept is None or kept.instance is not instance:
            fresh = _InstanceEntry(
                instance, self._options.wrap_function(self._function.__get__(instance, owner))
            )
            if kept is None:
                # If two threads come first at the same time, `setdefault` gives both the same object.
                kept = instance.__dict__.setdefault(self._name, fresh)
            else:
                kept = instance.__dict__[self._name] = fresh
        made: Batched[T, R] = kept.made
        return made

    def __set__(self, instance: S, value: Never) -> None:
        raise AttributeError(f"{self._name} cannot be set")


class BatchedClass(Generic[P, T, R]):
    """Result of `batched` for a class: called like the class, it returns the `Batched` of one object that
    lives in a worker process. The process starts with the first item, or when `async with` or `with`
    begins. With several workers, each process has its own object."""

    def __init__(self, cls: Callable[P, Any], options: _BatchedOptions) -> None:
        update_wrapper(self, cls, updated=())
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Batched[T, R]:
        import pickle

        from dispatcher.batched.caller_hooks import CallerHooksWorker
        from dispatcher.batched.messages import WorkerTarget
        from dispatcher.batched.worker_process import ProcessWorker

        cls: type = self.__wrapped__  # type: ignore[attr-defined]
        if "<locals>" in cls.__qualname__:
            raise TypeError(
                f"{cls.__qualname__} is defined within a function, where its worker process cannot find it: "
                "define it at the top of a module"
            )
        options = self._options
        terms = options.make_terms(cls.__qualname__, options.workers)
        is_pipelined = any(hasattr(cls, name) for name in HOOK_NAMES)
        has_caller_hooks = is_pipelined and options.hooks == "caller"
        target = pickle.dumps(
            WorkerTarget(
                cls.__module__,
                cls.__qualname__,
                args,
                kwargs,
                isolate=options.isolate,
                has_hooks=options.hooks == "worker",
                batch_hooks=options.batch_hooks,
                is_pipelined=is_pipelined,
            )
        )

        def make_worker(index: int) -> Worker[Any, R]:
            worker = ProcessWorker(target, terms.name, index, is_pipelined=is_pipelined)
            if not has_caller_hooks:
                return worker
            hooks = find_hooks(cls, terms.name, take_list=options.batch_hooks, isolate=options.isolate)
            return CallerHooksWorker(worker, hooks, terms.context)

        waiters = ThreadWaiters[Any, R](make_worker, terms, idle_s=inf)
        made = Batched(terms.name, waiters, _pass_on if has_caller_hooks else pickle.dumps)
        weakref.finalize(made, waiters.close).atexit = False  # no caller is left
        return made


@dataclass(frozen=True, slots=True)
class _BatchedOptions:
    """Arguments of a decorator."""

    rule: GroupingRule
    max_waiting: int
    concurrency: int
    isolate: bool
    workers: int
    hooks: Literal["worker", "caller"]
    batch_hooks: bool

    def make_terms(self, name: str, concurrency: int) -> CallTerms:
        return CallTerms(name, self.rule, self.max_waiting, concurrency, self.isolate, copy_context())

    def wrap_function(self, function: Callable[[list[T]], Any]) -> Batched[T, Any]:
        terms = self.make_terms(
            getattr(function, "__qualname__", type(function).__qualname__), self.concurrency
        )
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 -- the attribute itself is examined
        ):
            return Batched(terms.name, AsyncWaiters[T, Any](function, terms))
        return Batched(terms.name, ThreadWaiters[T, Any](lambda _: FunctionWorker(function, terms), terms))

    def decorate_object(self, decorated: Any) -> Any:
        """Return the batched form of a class, a function or a method."""
        if inspect.isclass(decorated):
            self._check_class(decorated)
            return BatchedClass(decorated, self)
        if not callable(decorated):
            raise TypeError(f"batched takes a function or a class, not {decorated!r}")
        if (self.workers, self.hooks, self.batch_hooks) != (1, "worker", False):
            raise TypeError(
                f"workers, hooks and batch_hooks are for classes, and {decorated!r} is none: use concurrency "
                "for several calls at once"
            )
        required = [
            each
            for each in inspect.signature(decorated).parameters.values()
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
        ]
        match len(required):
            case 1:
                made = self.wrap_function(decorated)
                update_wrapper(made, decorated)
                return made
            case 2:
                return BatchedMethod(decorated, self)
        raise TypeError(f"{decorated!r} must take one list of items, or as a method self and one list")

    def _check_class(self, cls: type) -> None:
        if not callable(getattr(cls, "transform", None)):
            raise TypeError(f"{cls.__qualname__} has no method transform(items)")
        if self.concurrency != 1:
            raise TypeError(f"concurrency is for functions: use workers for the class {cls.__qualname__}")
        if self.hooks == "worker":
            return
        for name in HOOK_NAMES:
            hook = inspect.getattr_static(cls, name, None)
            if hook is not None and not isinstance(hook, staticmethod | classmethod):
                raise TypeError(
                    f"{cls.__qualname__}.{name} must be a static method or a class method to run in the "
                    "process of the callers, because the object exists in the worker process only"
                )


class BatchedDecorator(Protocol):
    """Return value of `batched(…)`: decorates a class, a function or a method."""

    @overload
    def __call__(self, decorated: Callable[P, Steps[T, R]], /) -> BatchedClass[P, T, R]: ...
    @overload
    def __call__(self, decorated: Callable[P, Transform[T, R]], /) -> BatchedClass[P, T, R]: ...
    @overload
    def __call__(self, decorated: Callable[[list[T]], Awaitable[Sequence[R]]], /) -> Batched[T, R]: ...
    @overload
    def __call__(self, decorated: Callable[[list[T]], Sequence[R]], /) -> Batched[T, R]: ...
    @overload
    def __call__(
        self, decorated: Callable[[S, list[T]], Awaitable[Sequence[R]]], /
    ) -> BatchedMethod[S, T, R]: ...
    @overload
    def __call__(self, decorated: Callable[[S, list[T]], Sequence[R]], /) -> BatchedMethod[S, T, R]: ...


class ListHooksDecorator(Protocol):
    """Return value of `batched(batch_hooks=True, …)`: decorates a class."""

    @overload
    def __call__(self, decorated: Callable[P, ListSteps[T, R]], /) -> BatchedClass[P, T, R]: ...
    @overload
    def __call__(self, decorated: Callable[P, Transform[T, R]], /) -> BatchedClass[P, T, R]: ...


class _OtherOptions(TypedDict, total=False):
    """Arguments of `batched` that do not change the type of its result."""

    max_size: int
    timeout_s: float
    preferred_sizes: Sequence[int]
    idle_flush: bool
    max_waiting: int
    isolate: bool
    concurrency: int
    workers: int
    hooks: Literal["worker", "caller"]


@overload
def batched(*, batch_hooks: Literal[True], **options: Unpack[_OtherOptions]) -> ListHooksDecorator: ...
@overload
def batched(*, batch_hooks: Literal[False] = False, **options: Unpack[_OtherOptions]) -> BatchedDecorator: ...
def batched(
    *,
    max_size: int = 200,
    timeout_s: float = 0.1,
    preferred_sizes: Sequence[int] = (),
    idle_flush: bool = True,
    max_waiting: int = 10_000,
    isolate: bool = True,
    concurrency: int = 1,
    workers: int = 1,
    hooks: Literal["worker", "caller"] = "worker",
    batch_hooks: bool = False,
) -> BatchedDecorator | ListHooksDecorator:
    """Turn a function of many items into one that many callers call with single items.

    It decorates a function of a list that returns a list of the same length (async or not), such a method
    (each instance has its own batches), or a class with the method `transform`, which is such a function, and
    the optional hooks `preprocess` and `postprocess`. An async function runs on the loop of its callers, any
    other function in a thread, and a class in its own process, where the object is created once. The function
    itself is `__wrapped__`.

    - `max_size`: maximum number of items of one call, up to 10,000.
    - `timeout_s`: how long the first item waits for others at most, up to 60 seconds.
    - `preferred_sizes`: sizes at which a call is made at once, without waiting for further items.
    - `idle_flush`: if no call runs, do not wait for further items; they gather while a call runs. False:
      items wait for `timeout_s` in that case as well, which makes fewer and larger calls, and each of them
      later.
    - `max_waiting`: number of items that may wait for their call, up to 1,000,000. A further caller gets
      TooManyPendingError. Each event loop has its own items if the function is async.
    - `isolate`: if a call raises, its items are run again in halves until the item that causes it is alone,
      and no other caller gets the exception. Answered items are not run again. False: all callers of the call
      get the exception. An exception that the function returns in place of a result always belongs to that
      item alone.
    - `concurrency`: number of calls of a function that may run at once, up to 1,000. A function that is not
      async has a thread for each.

    For classes only:

    - `workers`: number of worker processes, up to 64. Each creates its own object, which may choose its
      device by `worker_index()`. A process that dies is replaced alone, by one with the same index.
    - `hooks`: where `preprocess` and `postprocess` run. `"worker"`: in threads of the worker process.
      `"caller"`: in threads of this process; both must be static or class methods.
    - `batch_hooks`: True: the hooks get the list of all items of a call and return a list of the same length.
      False: they get one item.

    `preprocess(item)` returns the input of `transform`, and `postprocess(result)` returns the result for the
    caller. If `postprocess` requires two arguments, it gets the input of `transform` and its result. Hooks
    and `transform` run at the same time, each with another call: while `transform` runs, the next call is
    preprocessed and the last one is postprocessed.

    Raises ValueError or TypeError for arguments that it cannot use.
    """
    numbers = {
        "max_size": max_size,
        "timeout_s": timeout_s,
        "max_waiting": max_waiting,
        "concurrency": concurrency,
        "workers": workers,
    }
    for name, value in [*numbers.items(), *(("preferred_sizes", each) for each in preferred_sizes)]:
        low, high = _BOUNDS[name]
        if not low <= value <= high:  # NaN is in no range
            raise ValueError(f"{name}: {low} to {high:,}, not {value!r}")
    if hooks not in ("worker", "caller"):
        raise ValueError(f"hooks: 'worker' or 'caller', not {hooks!r}")
    rule = GroupingRule(max_size, tuple(preferred_sizes), timeout_s, idle_flush)
    options = _BatchedOptions(rule, max_waiting, concurrency, isolate, workers, hooks, batch_hooks)
    return options.decorate_object
