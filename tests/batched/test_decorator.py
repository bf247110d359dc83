"""`batched` on async functions: who goes together, when, and what each caller gets."""

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
from typing import Any, assert_type

import pytest

from dispatcher.client import Batched, BatchError, ClosedError, TooManyPendingError, WrongLengthError, batched
from dispatcher.lab.simulation import virtual_loop
from tests.support import wait_until


class Recorder:
    """A function over lists, as a user would write one: it takes so long, and notes each call."""

    def __init__(self, takes_s: float = 0.0, *, bad: frozenset[object] = frozenset()) -> None:
        self.takes_s = takes_s
        self.bad = bad
        self.calls: list[list[Any]] = []
        self.at: list[float] = []
        self.max_limit = self.running = 0

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.calls.append(items)
        self.at.append(asyncio.get_running_loop().time())
        self.running += 1
        self.max_limit = max(self.max_limit, self.running)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.running -= 1
        if found := self.bad & set(items):
            raise LookupError(f"bad: {sorted(map(str, found))}")
        return [("of", item) for item in items]

    @property
    def told(self) -> list[tuple[int, int]]:
        """Size and time in ms of each call."""
        return [(len(items), round(at * 1000)) for items, at in zip(self.calls, self.at, strict=True)]


async def all_of(
    function: Callable[[Any], Coroutine[Any, Any, Any]], count: int, every_s: float = 0.0
) -> None:
    """Items 0, 1, … , one every so often; each gets its own result."""

    async def one(item: int) -> None:
        await asyncio.sleep(item * every_s)
        assert await function(item) == ("of", item)

    await asyncio.gather(*map(one, range(count)))


class TestWhoGoesTogether:
    def test_single_items_go_by_the_preferred_size(self) -> None:
        calls = Recorder()
        function = batched(max_size=8, preferred_sizes=(4, 8), idle_flush=False)(calls)
        virtual_loop.run_in_virtual_time(all_of(function, 16, 0.01))
        assert calls.told == [(4, 30), (4, 70), (4, 110), (4, 150)]

    def test_what_comes_while_a_call_runs_makes_the_next_one_larger(self) -> None:
        calls = Recorder(0.075)
        function = batched(max_size=8, preferred_sizes=(4, 8), idle_flush=False)(calls)
        virtual_loop.run_in_virtual_time(all_of(function, 16, 0.01))
        assert calls.told == [(4, 30), (4, 105), (8, 180)]

    def test_items_wait_for_others_as_long_as_they_may(self) -> None:
        calls = Recorder()
        virtual_loop.run_in_virtual_time(
            all_of(batched(max_size=8, timeout_s=0.1, idle_flush=False)(calls), 6, 0.03)
        )
        assert calls.told == [(4, 100), (2, 220)]

    def test_nobody_is_waited_for_where_no_call_runs(self) -> None:
        calls = Recorder(0.05)
        virtual_loop.run_in_virtual_time(all_of(batched(max_size=8, timeout_s=10.0)(calls), 6, 0.01))
        assert calls.told == [(1, 0), (5, 50)]

    def test_what_comes_at_once_goes_at_once(self) -> None:
        calls = Recorder()
        virtual_loop.run_in_virtual_time(all_of(batched(max_size=8)(calls), 20))
        assert calls.told == [(8, 0), (8, 0), (4, 0)]

    @pytest.mark.parametrize("idle_flush", [True, False])
    def test_callers_that_ask_again_at_once_stay_together(self, idle_flush: bool) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=50, idle_flush=idle_flush)(calls)

        async def caller(name: int) -> None:
            for number in range(10):
                asked = asyncio.create_task(function((name, number)))
                assert await asyncio.wait_for(asked, 1) == ("of", (name, number))

        async def main() -> None:
            await asyncio.gather(*map(caller, range(50)))

        virtual_loop.run_in_virtual_time(main())
        assert calls.told == [(50, 10 * number) for number in range(10)]

    def test_those_who_ask_again_a_round_later_are_not_left_behind(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=50)(calls)

        async def caller(name: int) -> None:
            for number in range(10):
                assert await function((name, number)) == ("of", (name, number))
                for _ in range(name % 3):
                    await asyncio.sleep(0)

        async def main() -> None:
            await asyncio.gather(*map(caller, range(30)))

        virtual_loop.run_in_virtual_time(main())
        assert calls.told == [(30, 10 * number) for number in range(10)]

    def test_so_many_calls_run_at_once_as_may(self) -> None:
        calls = Recorder(0.1)
        virtual_loop.run_in_virtual_time(all_of(batched(max_size=2, concurrency=3)(calls), 12))
        assert calls.told == [(2, 0)] * 3 + [(2, 100)] * 3
        assert calls.max_limit == 3

    def test_where_a_call_runs_others_are_waited_for_though_another_might(self) -> None:
        calls = Recorder(1.0)
        virtual_loop.run_in_virtual_time(
            all_of(batched(max_size=8, timeout_s=0.25, concurrency=2)(calls), 4, 0.1)
        )
        assert calls.told == [(1, 0), (3, 350)]

    def test_items_keep_their_order(self) -> None:
        calls = Recorder(0.01)
        virtual_loop.run_in_virtual_time(all_of(batched(max_size=7)(calls), 100, 0.002))
        assert all(a < b for items in calls.calls for a, b in pairwise(items))
        assert [item for items in calls.calls for item in items] == list(range(100))

    def test_each_loop_has_calls_of_its_own(self) -> None:
        calls = Recorder()
        function = batched(max_size=8)(calls)
        for _ in range(3):
            virtual_loop.run_in_virtual_time(all_of(function, 4))
        assert [len(items) for items in calls.calls] == [4, 4, 4]


class TestErrors:
    def outcomes(self, calls: Callable[[list[Any]], Any], items: list[Any], **options: Any) -> list[Any]:
        """What each caller gets, exceptions too."""
        function = batched(max_size=len(items), **options)(calls)

        async def main() -> list[Any]:
            return await asyncio.gather(*map(function, items), return_exceptions=True)

        return virtual_loop.run_in_virtual_time(main())

    def test_an_exception_in_an_items_place_is_its_own(self) -> None:
        async def halves(items: list[int]) -> list[Any]:
            return [ValueError(f"{item} is odd") if item % 2 else item // 2 for item in items]

        told = self.outcomes(halves, [2, 3, 4])
        assert [told[0], told[2]] == [1, 2]
        assert isinstance(told[1], ValueError)
        assert str(told[1]) == "3 is odd"

    def test_who_is_to_blame_alone_gets_what_the_call_raised(self) -> None:
        calls = Recorder(bad=frozenset({5}))
        told = self.outcomes(calls, list(range(8)))
        assert [each for each in told if not isinstance(each, LookupError)] == [
            ("of", item) for item in range(8) if item != 5
        ]
        assert str(told[5]) == "bad: ['5']"
        # The first half is answered, so the second is not run as a whole again.
        assert calls.calls == [list(range(8)), [0, 1, 2, 3], [4, 5], [4], [5], [6, 7]]

    def test_all_get_it_where_nobody_is_sought(self) -> None:
        calls = Recorder(bad=frozenset({5}))
        told = self.outcomes(calls, list(range(8)), isolate=False)
        assert len(calls.calls) == 1
        assert {str(each) for each in told} == {"bad: ['5']"}

    @pytest.mark.parametrize(
        ("returned", "said"),
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
    def test_anything_but_a_result_for_each_is_an_error_that_says_so(
        self, returned: Any, said: str, isolate: bool
    ) -> None:
        called = 0

        async def function(items: list[int]) -> Any:
            nonlocal called
            called += 1
            return returned

        told = self.outcomes(function, [1, 2, 3], isolate=isolate)
        assert {type(each) for each in told} == {WrongLengthError}
        assert said in str(told[0])
        assert "one result for each of 3 items" in str(told[0])
        assert called == 1, "it is nobody's fault among the items"

    def test_whatever_has_a_length_will_do(self) -> None:
        async def pairs(items: list[int]) -> tuple[int, ...]:
            return tuple(items)

        assert self.outcomes(pairs, [1, 2]) == [1, 2]

    def test_an_error_that_no_future_can_carry_is_told_as_another(self) -> None:
        async def stops(items: list[int]) -> list[Any]:
            return [StopIteration("over"), 2]

        told = self.outcomes(stops, [1, 2])
        assert str(told[0]).endswith("stops raised StopIteration: over")
        assert told[1] == 2
        assert isinstance(told[0], BatchError)

    def test_a_call_that_is_cancelled_from_within_is_no_cancelled_caller(self) -> None:
        async def gives_up(items: list[int]) -> list[int]:
            raise asyncio.CancelledError

        [told] = self.outcomes(gives_up, [1])
        assert isinstance(told, BatchError)
        assert isinstance(told.__cause__, asyncio.CancelledError)


class TestCancelling:
    async def test_one_who_waits_leaves_the_others_alone(self) -> None:
        calls = Recorder()
        function = batched(max_size=8, timeout_s=0.02, idle_flush=False)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert calls.calls == [[0, 2, 3]]
        assert isinstance(told[1], asyncio.CancelledError)
        assert [told[n] for n in (0, 2, 3)] == [("of", n) for n in (0, 2, 3)]

    async def test_one_whose_item_runs_leaves_the_others_alone(self) -> None:
        calls = Recorder(0.05)
        function = batched(max_size=3)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(3)]
        await wait_until(lambda: calls.running)
        tasks[0].cancel()
        assert (await asyncio.gather(*tasks, return_exceptions=True))[1:] == [("of", 1), ("of", 2)]

    async def test_a_call_that_nobody_waits_for_is_cancelled(self) -> None:
        calls = Recorder(600)
        function = batched(max_size=2)(calls)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await asyncio.gather(function(1), function(2))
            await wait_until(lambda: not function.running)
        assert calls.running == 0
        assert function.waiting == 0

    async def test_a_call_is_cancelled_once(self) -> None:
        """It may have to clean up, which the next one that leaves does not break off."""
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

    async def test_what_was_answered_stays_so_when_the_rest_is_broken_off(self) -> None:
        @batched(max_size=2)
        async def function(items: list[int]) -> list[int]:
            if len(items) == 2:
                raise LookupError("too many")
            if items == [1]:
                raise asyncio.CancelledError
            return items

        told = await asyncio.gather(function(0), function(1), return_exceptions=True)
        assert told[0] == 0
        assert isinstance(told[1], BatchError)

    async def test_places_of_those_who_left_are_free(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=2, max_queue=1, when_full="raise")(calls)
        running = [asyncio.create_task(function(item)) for item in range(2)]
        await wait_until(lambda: calls.running)
        waiting = [asyncio.create_task(function(item)) for item in range(2)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert function.waiting == 0
        assert await function("late") == ("of", "late")
        await asyncio.gather(*running)


class TestTheLine:
    async def test_more_than_may_wait_are_refused_where_that_is_asked_for(self) -> None:
        calls = Recorder(0.02)
        function = batched(max_size=2, max_queue=3, when_full="raise")(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(10)]
        told = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [each for each in told if isinstance(each, TooManyPendingError)]
        assert len(refused) == 4
        assert "6 items wait for" in str(refused[0])

    async def test_any_number_wait_where_nothing_is_said(self) -> None:
        calls = Recorder()
        function = batched(max_size=1, max_queue=1)(calls)
        await all_of(function, 20)
        assert len(calls.calls) == 20

    async def test_a_call_runs_in_the_context_of_none_of_its_callers(self) -> None:
        user: ContextVar[str] = ContextVar("user", default="nobody")

        @batched(max_size=8)
        async def users(items: list[int]) -> list[str]:
            return [user.get()] * len(items)

        async def caller(name: str) -> str:
            user.set(name)
            return await users(1)

        assert set(await asyncio.gather(*map(caller, "abc"))) == {"nobody"}

    async def test_closing_answers_what_waits_and_takes_nothing_more(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=3, timeout_s=600.0, idle_flush=False)(calls)
        tasks = [asyncio.create_task(function(item)) for item in range(7)]
        await asyncio.sleep(0)
        await function.aclose()
        assert [task.result() for task in tasks if task.done()] == [("of", item) for item in range(7)]
        with pytest.raises(ClosedError, match="was closed"):
            await function(7)
        with pytest.raises(ClosedError):
            await asyncio.to_thread(function.sync, 7)
        await function.aclose()

    async def test_closing_from_elsewhere_hastens_what_waits(self) -> None:
        function = batched(max_size=3, timeout_s=600.0, idle_flush=False)(Recorder())
        task = asyncio.create_task(function(1))
        for _ in range(5):
            await asyncio.sleep(0)
        await asyncio.to_thread(function.close)
        assert await asyncio.wait_for(task, 10) == ("of", 1)

    async def test_a_block_closes_it(self) -> None:
        async with batched()(Recorder()) as function:
            assert await function(1) == ("of", 1)
        with pytest.raises(ClosedError):
            await function(1)

    async def test_it_tells_how_it_is(self) -> None:
        calls = Recorder(0.01)

        @batched(max_size=2)
        async def embed(items: list[int]) -> list[Any]:
            """Of many."""
            return await calls(items)

        tasks = [asyncio.create_task(embed(item)) for item in range(5)]
        await wait_until(lambda: calls.running)
        assert (embed.waiting, embed.running) == (3, 1)
        assert repr(embed).endswith("embed: 3 wait, 1 calls run>")
        assert embed.__doc__ == "Of many."
        await asyncio.gather(*tasks)


class TestThreads:
    def test_threads_without_a_loop_may_call_it(self) -> None:
        calls = Recorder(0.01)
        function = batched(max_size=8)(calls)
        told: list[Any] = [None] * 20

        def caller(item: int) -> None:
            told[item] = function.sync(item)

        threads = [threading.Thread(target=caller, args=(item,)) for item in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == [("of", item) for item in range(20)]
        assert len(calls.calls) < 20
        function.close()
        with pytest.raises(ClosedError):
            function.sync(1)

    async def test_no_thread_is_left_of_it(self) -> None:
        def loops() -> int:
            return sum(thread.name == "Recorder" for thread in threading.enumerate())

        function: Batched[int, Any] = batched()(Recorder())
        assert await asyncio.to_thread(function.sync, 1) == ("of", 1)
        assert loops() == 1
        await function.aclose()
        assert loops() == 0
        another: Batched[int, Any] = batched()(Recorder())
        assert await asyncio.to_thread(another.sync, 1) == ("of", 1)
        del another
        gc.collect()
        await wait_until(lambda: loops() == 0)

    def test_a_thread_waits_no_longer_than_it_will(self) -> None:
        calls = Recorder(600)
        with batched()(calls) as function, pytest.raises(TimeoutError):
            function.sync(1, timeout=0.05)
        assert calls.running == 0, "nobody waits for it any more"

    async def test_where_a_loop_runs_it_is_awaited(self) -> None:
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
            """Of many."""
            self.calls.append(len(texts))
            return [f"{self.name}:{text}" for text in texts]

    async def test_each_instance_has_calls_of_its_own(self) -> None:
        one, two = self.Model("one"), self.Model("two")
        told = await asyncio.gather(*(model.embed(text) for text in "ab" for model in (one, two)))
        assert told == ["one:a", "two:a", "one:b", "two:b"]
        assert (one.calls, two.calls) == ([2], [2])
        assert one.embed is one.embed
        assert self.Model.embed.__doc__ == "Of many."

    async def test_a_copy_of_an_instance_is_another_one(self) -> None:
        class_of_module = Plain()
        assert await class_of_module.own(1) == (1, id(class_of_module))
        for other in (
            copy.copy(class_of_module),
            copy.deepcopy(class_of_module),
            pickle.loads(pickle.dumps(class_of_module)),
        ):
            assert await other.own(1) == (1, id(other))

    def test_an_instance_is_not_kept(self) -> None:
        model = self.Model("gone")
        assert virtual_loop.run_in_virtual_time(model.embed("a")) == "gone:a"
        kept = weakref.ref(model)
        del model
        gc.collect()
        assert kept() is None

    def test_the_method_is_not_overwritten(self) -> None:
        with pytest.raises(AttributeError, match="embed"):
            self.Model("x").embed = 3  # type: ignore[assignment]

    async def test_an_instance_without_a_place_for_it_is_told_so(self) -> None:
        class Slotted:
            __slots__ = ()

            @batched()
            async def embed(self, texts: list[str]) -> list[str]:
                return texts

        with pytest.raises(TypeError, match="__slots__"):
            await Slotted().embed("a")


class Plain:
    """At the top of a module, where pickle finds it."""

    @batched()
    async def own(self, items: list[int]) -> list[tuple[int, int]]:
        return [(item, id(self)) for item in items]


class TestWhatIsDecorated:
    @pytest.mark.parametrize(
        "options",
        [{"max_size": 0}, {"timeout_s": -1}, {"max_queue": 0}, {"concurrency": 0}, {"preferred_sizes": [0]}],
    )
    def test_numbers_that_make_no_sense_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            batched(**options)

    def test_a_word_that_is_none_is_refused(self) -> None:
        with pytest.raises(ValueError, match="when_full"):
            batched(when_full="drop")  # type: ignore[arg-type]

    @pytest.mark.parametrize("decorated", [3, int.real, lambda a, b, c: [], object])
    def test_what_takes_no_list_is_refused(self, decorated: Any) -> None:
        with pytest.raises(TypeError):
            batched()(decorated)

    async def test_further_arguments_with_defaults_are_the_functions_own(self) -> None:
        @batched()
        async def times(items: list[int], by: int = 3) -> list[int]:
            return [item * by for item in items]

        assert await times(2) == 6

    async def test_types_are_those_of_one_item(self) -> None:
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
