"""`batched` with async functions: which items share a call, when it runs, and what each caller gets."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from itertools import pairwise
from math import nan
from typing import Any, assert_type

import pytest

from dispatcher.client import Batched, BatchError, ClosedError, TooManyPendingError, WrongLengthError, batched
from dispatcher.lab.simulation import virtual_loop
from tests.support import wait_until


class Recorder:
    """A function over lists, as a user would write it. It takes `takes_s` and records each call."""

    def __init__(self, takes_s: float = 0.0, *, bad: frozenset[object] = frozenset()) -> None:
        self.takes_s = takes_s
        self.bad = bad
        self.calls: list[list[Any]] = []
        self.started_at: list[float] = []
        self.max_running = self.running = 0

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.calls.append(items)
        self.started_at.append(asyncio.get_running_loop().time())
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
        if found := self.bad & set(items):
            raise LookupError(f"bad: {sorted(map(str, found))}")
        return [("result", item) for item in items]

    @property
    def sizes_and_times(self) -> list[tuple[int, int]]:
        """Size and time in ms of each call."""
        return [(len(items), round(at * 1000)) for items, at in zip(self.calls, self.started_at, strict=True)]


async def call_with_items(
    function: Callable[[Any], Coroutine[Any, Any, Any]], count: int, every_s: float = 0.0
) -> None:
    """Call the function with the items 0, 1, …, one per interval, and check each result."""

    async def call_with_item(item: int) -> None:
        await asyncio.sleep(item * every_s)
        assert await function(item) == ("result", item)

    await asyncio.gather(*map(call_with_item, range(count)))


class TestGrouping:
    def test_single_items_are_grouped_to_the_preferred_size(self) -> None:
        calls = Recorder()
        function = batched(max_size=8, preferred_sizes=(4, 8), idle_flush=False)(calls)
        virtual_loop.run_in_virtual_time(call_with_items(function, 16, 0.01))
        assert calls.sizes_and_times == [(4, 30), (4, 70), (4, 110), (4, 150)]

    def test_items_that_arrive_during_a_call_make_the_next_one_larger(self) -> None:
        calls = Recorder(0.075)
        function = batched(max_size=8, preferred_sizes=(4, 8), idle_flush=False)(calls)
        virtual_loop.run_in_virtual_time(call_with_items(function, 16, 0.01))
        assert calls.sizes_and_times == [(4, 30), (4, 105), (8, 180)]

    def test_items_wait_for_others_until_the_time_out(self) -> None:
        calls = Recorder()
        virtual_loop.run_in_virtual_time(
            call_with_items(batched(max_size=8, timeout_s=0.1, idle_flush=False)(calls), 6, 0.03)
        )
        assert calls.sizes_and_times == [(4, 100), (2, 220)]

    def test_item_does_not_wait_while_no_call_runs(self) -> None:
        calls = Recorder(0.05)
        virtual_loop.run_in_virtual_time(call_with_items(batched(max_size=8, timeout_s=10.0)(calls), 6, 0.01))
        assert calls.sizes_and_times == [(1, 0), (5, 50)]

    def test_items_that_arrive_together_are_called_at_once(self) -> None:
        calls = Recorder()
        virtual_loop.run_in_virtual_time(call_with_items(batched(max_size=8)(calls), 20))
        assert calls.sizes_and_times == [(8, 0), (8, 0), (4, 0)]

    @pytest.mark.parametrize("idle_flush", [True, False])
    def test_callers_in_a_loop_stay_in_one_batch(self, idle_flush: bool) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=50, idle_flush=idle_flush)(calls)

        async def caller(name: int) -> None:
            for number in range(10):
                call = asyncio.create_task(function((name, number)))
                assert await asyncio.wait_for(call, 1) == ("result", (name, number))

        async def main() -> None:
            await asyncio.gather(*map(caller, range(50)))

        virtual_loop.run_in_virtual_time(main())
        assert calls.sizes_and_times == [(50, 10 * number) for number in range(10)]

    def test_callers_that_return_some_loop_iterations_later_stay_in_the_batch(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=50)(calls)

        async def caller(name: int) -> None:
            for number in range(10):
                assert await function((name, number)) == ("result", (name, number))
                for _ in range(name % 3):
                    await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(*map(caller, range(30)))

        virtual_loop.run_in_virtual_time(main())
        assert calls.sizes_and_times == [(30, 10 * number) for number in range(10)]

    def test_concurrency_limits_the_parallel_calls(self) -> None:
        calls = Recorder(0.1)
        virtual_loop.run_in_virtual_time(call_with_items(batched(max_size=2, concurrency=3)(calls), 12))
        assert calls.sizes_and_times == [(2, 0)] * 3 + [(2, 100)] * 3
        assert calls.max_running == 3

    def test_items_wait_while_a_call_runs_although_another_could_start(self) -> None:
        calls = Recorder(1.0)
        virtual_loop.run_in_virtual_time(
            call_with_items(batched(max_size=8, timeout_s=0.25, concurrency=2)(calls), 4, 0.1)
        )
        assert calls.sizes_and_times == [(1, 0), (3, 350)]

    def test_items_keep_their_order(self) -> None:
        calls = Recorder(0.01)
        virtual_loop.run_in_virtual_time(call_with_items(batched(max_size=7)(calls), 100, 0.002))
        assert all(a < b for items in calls.calls for a, b in pairwise(items))
        assert [item for items in calls.calls for item in items] == list(range(100))

    def test_each_event_loop_has_its_own_calls(self) -> None:
        calls = Recorder()
        function = batched(max_size=8)(calls)
        for _ in range(3):
            virtual_loop.run_in_virtual_time(call_with_items(function, 4))
        assert [len(items) for items in calls.calls] == [4, 4, 4]


class TestErrors:
    def get_outcomes(self, calls: Callable[[list[Any]], Any], items: list[Any], **options: Any) -> list[Any]:
        """Return the result or exception of each caller."""
        function = batched(max_size=len(items), **options)(calls)

        async def main() -> list[Any]:
            return await asyncio.gather(*map(function, items), return_exceptions=True)

        return virtual_loop.run_in_virtual_time(main())

    def test_returned_exception_is_raised_for_its_item(self) -> None:
        async def halves(items: list[int]) -> list[Any]:
            return [ValueError(f"{item} is odd") if item % 2 else item // 2 for item in items]

        outcomes = self.get_outcomes(halves, [2, 3, 4])
        assert [outcomes[0], outcomes[2]] == [1, 2]
        assert isinstance(outcomes[1], ValueError)
        assert str(outcomes[1]) == "3 is odd"

    def test_only_the_caller_of_the_failing_item_gets_the_error(self) -> None:
        calls = Recorder(bad=frozenset({5}))
        outcomes = self.get_outcomes(calls, list(range(8)))
        assert [each for each in outcomes if not isinstance(each, LookupError)] == [
            ("result", item) for item in range(8) if item != 5
        ]
        assert str(outcomes[5]) == "bad: ['5']"
        # The first half succeeds, so the second half is not repeated as a whole.
        assert calls.calls == [list(range(8)), [0, 1, 2, 3], [4, 5], [4], [5], [6, 7]]

    def test_all_callers_get_the_error_without_isolation(self) -> None:
        calls = Recorder(bad=frozenset({5}))
        outcomes = self.get_outcomes(calls, list(range(8)), isolate=False)
        assert len(calls.calls) == 1
        assert {str(each) for each in outcomes} == {"bad: ['5']"}

    @pytest.mark.parametrize(
        ("returned", "expected"),
        [
            ([1], "returned 1 results"),
            ([1, 2, 3, 4], "returned more than 3 results"),
            (None, "returned a NoneType"),
            ({1: 1, 2: 2, 3: 3}, "returned a dict"),
            ("abc", "returned a str"),
            ((each for each in [1, 2, 3]), "returned a generator"),
        ],
    )
    @pytest.mark.parametrize("isolate", [True, False])
    def test_invalid_results_are_an_error_for_all_callers(
        self, returned: Any, expected: str, isolate: bool
    ) -> None:
        called = 0

        async def function(items: list[int]) -> Any:
            nonlocal called
            called += 1
            return returned

        outcomes = self.get_outcomes(function, [1, 2, 3], isolate=isolate)
        assert {type(each) for each in outcomes} == {WrongLengthError}
        assert expected in str(outcomes[0])
        assert "one result for each of 3 items" in str(outcomes[0])
        assert called == 1, "no item is at fault, so the call is not repeated"

    def test_result_can_be_a_tuple(self) -> None:
        async def pairs(items: list[int]) -> tuple[int, ...]:
            return tuple(items)

        assert self.get_outcomes(pairs, [1, 2]) == [1, 2]

    def test_stop_iteration_becomes_a_batch_error(self) -> None:
        async def stops(items: list[int]) -> list[Any]:
            return [StopIteration("over"), 2]

        outcomes = self.get_outcomes(stops, [1, 2])
        assert str(outcomes[0]).endswith("stops raised StopIteration: over")
        assert outcomes[1] == 2
        assert isinstance(outcomes[0], BatchError)

    def test_cancelled_error_raised_by_the_function_is_a_batch_error(self) -> None:
        async def raises_cancelled_error(items: list[int]) -> list[int]:
            raise asyncio.CancelledError

        [outcome] = self.get_outcomes(raises_cancelled_error, [1])
        assert isinstance(outcome, BatchError)
        assert isinstance(outcome.__cause__, asyncio.CancelledError)


class TestCancelling:
    async def test_cancelled_waiting_caller_does_not_affect_the_others(self) -> None:
        calls = Recorder()
        function = batched(max_size=8, timeout_s=0.02, idle_flush=False)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert calls.calls == [[0, 2, 3]]
        assert isinstance(outcomes[1], asyncio.CancelledError)
        assert [outcomes[n] for n in (0, 2, 3)] == [("result", n) for n in (0, 2, 3)]

    async def test_cancelled_running_caller_does_not_affect_the_others(self) -> None:
        calls = Recorder(0.05)
        function = batched(max_size=3)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(3)]
        await wait_until(lambda: calls.running)
        tasks[0].cancel()
        assert (await asyncio.gather(*tasks, return_exceptions=True))[1:] == [("result", 1), ("result", 2)]

    async def test_call_without_callers_is_cancelled(self) -> None:
        calls = Recorder(600)
        function = batched(max_size=2)(calls)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.gather(function(1), function(2))
            await wait_until(lambda: not function.running)
        assert calls.running == 0
        assert function.waiting == 0

    async def test_call_is_cancelled_once(self) -> None:
        """A second cancellation would interrupt the cleanup of the call."""
        cleaned = asyncio.Event()

        @batched(max_size=2)
        async def function(items: list[int]) -> list[int]:
            try:
                await asyncio.sleep(600)
            finally:
                await asyncio.sleep(0.02)
                cleaned.set()
            return items

        running = [asyncio.create_task(function(item)) for item in range(2)]
        await wait_until(lambda: function.running)
        waiting = asyncio.create_task(function(2))
        await asyncio.sleep(0)
        for task in (*running, waiting):
            task.cancel()
            await asyncio.wait([task])
        await asyncio.wait_for(cleaned.wait(), 10)

    async def test_results_stay_when_a_later_part_is_cancelled(self) -> None:
        @batched(max_size=2)
        async def function(items: list[int]) -> list[int]:
            if len(items) == 2:
                raise LookupError("too many")
            if items == [1]:
                raise asyncio.CancelledError
            return items

        outcomes = await asyncio.gather(function(0), function(1), return_exceptions=True)
        assert outcomes[0] == 0
        assert isinstance(outcomes[1], BatchError)

    async def test_cancelled_callers_free_their_places(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=2, max_waiting=2)(calls)
        running = [asyncio.create_task(function(item)) for item in range(2)]
        await wait_until(lambda: calls.running)
        waiting = [asyncio.create_task(function(item)) for item in range(2)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert function.waiting == 0
        assert await function("late") == ("result", "late")
        await asyncio.gather(*running)


class TestQueue:
    async def test_full_queue_raises(self) -> None:
        calls = Recorder(0.02)
        function = batched(max_size=2, max_waiting=6)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(10)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [each for each in outcomes if isinstance(each, TooManyPendingError)]
        assert len(errors) == 4
        assert "6 items wait for Recorder, and max_waiting=6 allows no more" in str(errors[0])

    async def test_number_of_waiting_items_is_bounded_by_default(self) -> None:
        function = batched()(Recorder())
        async with function:
            outcomes = await asyncio.gather(*map(function, range(10_001)), return_exceptions=True)
        assert sum(isinstance(each, TooManyPendingError) for each in outcomes) == 1
        assert outcomes[:10_000] == [("result", item) for item in range(10_000)]

    async def test_call_does_not_run_in_the_context_of_a_caller(self) -> None:
        user: ContextVar[str] = ContextVar("user", default="nobody")

        @batched(max_size=8)
        async def users(items: list[int]) -> list[str]:
            return [user.get()] * len(items)

        async def caller(name: str) -> str:
            user.set(name)
            return await users(1)

        assert set(await asyncio.gather(*map(caller, "abc"))) == {"nobody"}

    async def test_closing_answers_waiting_items_and_rejects_new_ones(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=3, timeout_s=60.0, idle_flush=False)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(7)]
        await asyncio.sleep(0)
        await function.aclose()
        assert [task.result() for task in tasks if task.done()] == [("result", item) for item in range(7)]
        with pytest.raises(ClosedError, match="was closed"):
            await function(7)
        with pytest.raises(ClosedError):
            await asyncio.to_thread(function.sync, 7)
        await function.aclose()

    async def test_closing_from_another_thread_flushes_waiting_items(self) -> None:
        function = batched(max_size=3, timeout_s=60.0, idle_flush=False)(Recorder())
        task = asyncio.create_task(function(1))
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.to_thread(function.close)
        assert await asyncio.wait_for(task, 10) == ("result", 1)

    async def test_context_manager_closes_the_function(self) -> None:
        async with batched()(Recorder()) as function:
            assert await function(1) == ("result", 1)
        with pytest.raises(ClosedError):
            await function(1)

    async def test_attributes_and_repr_show_the_state(self) -> None:
        calls = Recorder(0.01)

        @batched(max_size=2)
        async def embed(items: list[int]) -> list[Any]:
            """Embed many."""
            return await calls(items)

        tasks = [asyncio.create_task(embed(item)) for item in range(5)]
        await wait_until(lambda: calls.running)
        assert (embed.waiting, embed.running) == (3, 1)
        assert repr(embed).endswith("embed: 3 wait, 1 calls run>")
        assert embed.__doc__ == "Embed many."
        await asyncio.gather(*tasks)


class TestThreads:
    def test_threads_can_call_the_function(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=8)(calls)
        outcomes: list[Any] = [None] * 20

        def caller(item: int) -> None:
            outcomes[item] = function.sync(item)

        threads = [threading.Thread(target=caller, args=(item,)) for item in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes == [("result", item) for item in range(20)]
        assert len(calls.calls) < 20
        function.close()
        with pytest.raises(ClosedError):
            function.sync(1)

    async def test_closed_or_collected_function_leaves_no_thread(self) -> None:
        def count_loop_threads() -> int:
            return sum(thread.name == "Recorder" for thread in threading.enumerate())

        function: Batched[int, Any] = batched()(Recorder())
        assert await asyncio.to_thread(function.sync, 1) == ("result", 1)
        assert count_loop_threads() == 1
        await function.aclose()
        assert count_loop_threads() == 0
        another: Batched[int, Any] = batched()(Recorder())
        assert await asyncio.to_thread(another.sync, 1) == ("result", 1)
        del another
        gc.collect()
        await wait_until(lambda: count_loop_threads() == 0)

    def test_time_out_of_a_thread_cancels_the_call(self) -> None:
        calls = Recorder(600)
        with batched()(calls) as function, pytest.raises(TimeoutError):
            function.sync(1, timeout=0.05)
        assert calls.running == 0, "the call has no callers any more"

    async def test_sync_call_inside_an_event_loop_is_an_error(self) -> None:
        function = batched()(Recorder())
        with pytest.raises(RuntimeError, match="await"):
            function.sync(1)


class TestMethods:
    class Model:
        def __init__(self, name: str) -> None:
            self.name = name
            self.calls: list[int] = []

        @batched(max_size=8)
        async def embed(self, texts: list[str]) -> list[str]:
            """Embed many."""
            self.calls.append(len(texts))
            return [f"{self.name}:{text}" for text in texts]

    async def test_each_instance_has_its_own_calls(self) -> None:
        call_with_item, two = self.Model("one"), self.Model("two")
        outcomes = await asyncio.gather(
            *(model.embed(text) for text in "ab" for model in (call_with_item, two))
        )
        assert outcomes == ["one:a", "two:a", "one:b", "two:b"]
        assert (call_with_item.calls, two.calls) == ([2], [2])
        assert call_with_item.embed is call_with_item.embed
        assert self.Model.embed.__doc__ == "Embed many."

    async def test_copy_of_an_instance_has_its_own_calls(self) -> None:
        original = ModuleLevelClass()
        assert await original.own(1) == (1, id(original))
        for other in (
            copy.copy(original),
            copy.deepcopy(original),
            pickle.loads(pickle.dumps(original)),
        ):
            assert await other.own(1) == (1, id(other))

    def test_instance_can_be_garbage_collected(self) -> None:
        model = self.Model("gone")
        assert virtual_loop.run_in_virtual_time(model.embed("a")) == "gone:a"
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None

    def test_method_cannot_be_overwritten(self) -> None:
        with pytest.raises(AttributeError, match="embed"):
            self.Model("x").embed = 3  # type: ignore[assignment]

    async def test_class_with_slots_is_an_error(self) -> None:
        class Slotted:
            __slots__ = ()

            @batched()
            async def embed(self, texts: list[str]) -> list[str]:
                return texts

        with pytest.raises(TypeError, match="__slots__"):
            await Slotted().embed("a")


class ModuleLevelClass:
    """Defined at the top of a module, where pickle finds it."""

    @batched()
    async def own(self, items: list[int]) -> list[tuple[int, int]]:
        return [(item, id(self)) for item in items]


class TestDecorator:
    @pytest.mark.parametrize(
        "options",
        [
            {"max_size": 0},
            {"max_size": 10_001},
            {"timeout_s": -1},
            {"timeout_s": 60.1},
            {"timeout_s": nan},
            {"preferred_sizes": [0]},
            {"preferred_sizes": [4, 10_001]},
            {"max_waiting": 0},
            {"max_waiting": 1_000_001},
            {"concurrency": 0},
            {"concurrency": 1_001},
            {"workers": 0},
            {"workers": 65},
            {"hooks": "main"},
        ],
    )
    def test_value_out_of_bounds_is_rejected_by_name(self, options: dict[str, Any]) -> None:
        [name] = options
        with pytest.raises(ValueError, match=f"^{name}: "):
            batched(**options)

    def test_largest_values_are_accepted(self) -> None:
        batched(max_size=10_000, timeout_s=60, max_waiting=1_000_000, concurrency=1_000)(Recorder())

    @pytest.mark.parametrize("options", [{"workers": 2}, {"hooks": "caller"}, {"batch_hooks": True}])
    def test_options_of_classes_are_rejected_for_functions(self, options: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match="are for classes"):
            batched(**options)(Recorder())

    @pytest.mark.parametrize("decorated", [3, int.real, lambda a, b, c: [], object])
    def test_object_that_takes_no_list_is_rejected(self, decorated: Any) -> None:
        with pytest.raises(TypeError):
            batched()(decorated)

    async def test_further_arguments_keep_their_defaults(self) -> None:
        @batched()
        async def multiply(items: list[int], factor: int = 3) -> list[int]:
            return [item * factor for item in items]

        assert await multiply(2) == 6

    async def test_static_types_are_those_of_single_items(self) -> None:
        @batched()
        async def lengths(items: list[str]) -> list[int]:
            return [len(item) for item in items]

        @batched()
        def halves(items: list[int]) -> list[float]:
            return [item / 2 for item in items]

        assert_type(lengths, Batched[str, int])
        assert_type(await lengths("abc"), int)
        assert_type(await halves(3), float)
        assert_type(self.typed, Batched[str, bytes])

    @batched()
    def typed(self, items: list[str]) -> list[bytes]:
        return [item.encode() for item in items]
