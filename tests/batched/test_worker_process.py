"""`batched` on classes: one object in a process of its own, and what its callers get when that fails."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, assert_type

import psutil
import pytest

from dispatcher.client import Batched, BatchError, ClosedError, WorkerCrashedError, WrongLengthError, batched
from tests.client.models import Broken, Doubling, LoudModel, OddError, Shout, Slow
from tests.support import wait_until, wait_until_sync

THIS = psutil.Process()


def children() -> set[int]:
    return {each.pid for each in THIS.children(recursive=True)}


async def told(model: Batched[Any, Any], *items: Any) -> list[Any]:
    """What each caller gets, errors too."""
    return await asyncio.gather(*map(model, items), return_exceptions=True)


async def test_items_go_through_all_three_steps_in_another_process(tmp_path: Path) -> None:
    before = children()
    async with LoudModel("?", made_in=tmp_path / "made") as model:
        assert await told(model, " one ", "two", "three") == ["ONE?", "TWO?", "THREE?"]
        pid = await model("pid")
        assert pid in children() - before
        assert await model("batches") == 3
    assert (tmp_path / "made").read_text() == f"{pid}\n", "it was made once"
    assert children() == before


async def test_callers_that_come_together_go_together() -> None:
    async with LoudModel() as model:
        assert await told(model, *["together"] * 11) == [8] * 8 + [3] * 3


async def test_it_starts_with_the_first_item_where_nobody_entered_it() -> None:
    before = children()
    model = Doubling()
    assert children() == before
    assert_type(model, Batched[int, int])
    assert await told(model, 1, 2, 3) == [2, 4, 6]
    await model.aclose()
    assert children() == before
    with pytest.raises(ClosedError):
        await model(1)


def test_threads_may_call_it() -> None:
    with Doubling() as model:
        results: dict[int, int] = {}
        threads = [threading.Thread(target=lambda n=n: results.update({n: model.sync(n)})) for n in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: 2 * n for n in range(30)}


class TestErrors:
    async def test_each_item_has_the_error_that_is_its_own(self) -> None:
        async with LoudModel() as model:
            items = ["fine", "bad before", "bad after", "put", "return it", "raise", "lambda", "also fine"]
            got = await told(model, *items)
        assert [got[0], got[7]] == ["FINE!", "ALSO FINE!"]
        assert [repr(each) for each in got[1:6]] == [
            "ValueError('not before')",
            "ValueError('not after')",
            "KeyError('put in its place')",
            "KeyError('returned')",
            "RuntimeError('raised in transform')",
        ]
        assert isinstance(got[6], TypeError)
        assert "the result cannot be pickled" in str(got[6])

    @pytest.mark.parametrize("word", ["put", "return it"])
    async def test_an_exception_that_is_returned_is_raised(self, word: str) -> None:
        async with LoudModel() as model:
            with pytest.raises(KeyError):
                await model(word)

    async def test_an_error_tells_where_it_was_raised(self) -> None:
        async with LoudModel() as model:
            with pytest.raises(RuntimeError) as raised:
                await model("raise")
        [note] = raised.value.__notes__
        assert "In the worker process" in note
        assert "models.py" in note

    async def test_an_error_that_cannot_be_made_again_here_is_told_in_words(self) -> None:
        async with LoudModel() as model:
            with pytest.raises(BatchError, match="OddError: odd: as always") as raised:
                await model("odd")
        assert not isinstance(raised.value, OddError)

    async def test_an_item_that_cannot_be_pickled_harms_no_other(self) -> None:
        async with LoudModel() as model:
            got = await told(model, "one", lambda: None, "two")
        assert [got[0], got[2]] == ["ONE!", "TWO!"]
        assert "pickle" in str(got[1])

    async def test_a_result_too_few_is_an_error_that_says_so(self) -> None:
        async with LoudModel() as model:
            with pytest.raises(WrongLengthError, match="transform returned 0 results"):
                await model("short")
            assert await model("fine") == "FINE!"

    async def test_sys_exit_in_the_model_ends_its_process(self) -> None:
        async with LoudModel() as model:
            with pytest.raises(WorkerCrashedError, match="exit code 4"):
                await model("exit")
            assert await model("fine") == "FINE!"


class TestCrashes:
    @pytest.mark.parametrize(("order", "how"), [("die", "SIGKILL"), ("leave", "exit code 3")])
    async def test_a_crash_fails_what_was_held_and_nothing_else(
        self, order: str, how: str, tmp_path: Path
    ) -> None:
        async with LoudModel(made_in=tmp_path / "made") as model:
            first = await model("pid")
            held, waits = told(model, *["a"] * 7, order), told(model, "b", "c")
            got, after = await asyncio.gather(held, waits)
            assert {type(each) for each in got} == {WorkerCrashedError}
            assert f"ended by {how} while it held 8 items" in str(got[0])
            assert after == ["B!", "C!"]
            assert await model("pid") != first
        assert len((tmp_path / "made").read_text().split()) == 2, "it was not tried again"

    async def test_a_worker_that_was_killed_while_it_held_nothing_is_replaced_unnoticed(self) -> None:
        async with LoudModel() as model:
            for _ in range(3):
                pid = await model("pid")
                os.kill(pid, signal.SIGKILL)
                assert await model("fine") == "FINE!"
                assert not psutil.pid_exists(pid), "no zombie is left of it"

    async def test_one_that_cannot_be_made_tells_each_caller(self) -> None:
        model = Broken("raise")
        for _ in range(2):
            got = await told(model, 1, 2)
            assert [repr(each) for each in got] == ["LookupError('no such model')"] * 2
        await model.aclose()

    async def test_one_that_dies_while_it_is_made_tells_each_caller(self) -> None:
        before = children()
        model = Broken("die")
        with pytest.raises(WorkerCrashedError, match="SIGKILL before it was ready"):
            await model(1)
        await model.aclose()
        assert children() == before

    async def test_one_that_could_not_be_made_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        model = Broken("once")
        with pytest.raises(LookupError, match="not yet"):
            await model(1)
        assert await model(1) == 1
        await model.aclose()

    async def test_entering_tells_that_it_cannot_be_made(self) -> None:
        before, threads = children(), threading.active_count()
        with pytest.raises(LookupError, match="no such model"):
            async with Broken("raise"):
                pytest.fail("it was entered")
        with pytest.raises(LookupError, match="no such model"), Broken("raise"):
            pytest.fail("it was entered")
        assert children() == before
        await wait_until(lambda: threading.active_count() <= threads + 1)  # asyncio's own


class TestEnds:
    async def test_one_that_nobody_holds_any_more_ends(self) -> None:
        before = children()
        model = Doubling()
        assert await model(1) == 2
        assert children() != before
        del model
        gc.collect()
        await wait_until(lambda: children() == before)

    async def test_closing_waits_for_what_runs(self) -> None:
        model = LoudModel()
        tasks = [asyncio.create_task(model("word")) for _ in range(20)]
        await asyncio.sleep(0)
        await model.aclose()
        assert await asyncio.gather(*tasks) == ["WORD!"] * 20

    async def test_ctrl_c_of_a_terminal_does_not_end_it(self) -> None:
        """That is sent to all; the program decides."""
        async with LoudModel() as model:
            pid = await model("pid")
            os.kill(pid, signal.SIGINT)
            assert await model("pid") == pid

    def run_batch(self, tmp_path: Path, code: str) -> subprocess.Popen[str]:
        """A program of its own, which has a model."""
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(code))
        return subprocess.Popen(
            [sys.executable, str(program)],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def test_a_program_leaves_none_behind(self, tmp_path: Path) -> None:
        """The class stands in the program itself, and so does the model: neither runs in the worker."""
        program = self.run_batch(
            tmp_path,
            """
            import os
            from dispatcher.client import batched

            @batched()
            class Model:
                def transform(self, items):
                    return [(os.getpid(), item) for item in items]

            model = Model()

            if __name__ == "__main__":
                pid, item = model.sync("word")
                print(pid, pid != os.getpid(), item)
            """,
        )
        out, err = program.communicate(timeout=60)
        assert (program.returncode, err) == (0, "")
        pid, other, item = out.split()
        assert (other, item) == ("True", "word")
        assert not psutil.pid_exists(int(pid))

    SLOW = """
        from tests.client.models import Slow

        if __name__ == "__main__":
            Slow().sync("busy")
    """

    def test_a_program_that_would_run_in_its_own_worker_is_told_so(self, tmp_path: Path) -> None:
        program = self.run_batch(tmp_path, "from tests.client.models import Slow; Slow().sync('busy')")
        _, err = program.communicate(timeout=30)
        assert "if __name__ == '__main__':" in err
        assert "WorkerCrashedError" in err.splitlines()[-1]
        assert not (tmp_path / "busy").exists()

    def busy(self, tmp_path: Path) -> psutil.Process:
        told = tmp_path / "busy"
        wait_until_sync(lambda: told.exists() and told.read_text(), timeout_s=30)
        return psutil.Process(int(told.read_text()))

    def test_a_program_that_is_killed_takes_its_worker_along(self, tmp_path: Path) -> None:
        program = self.run_batch(tmp_path, self.SLOW)
        worker = self.busy(tmp_path)
        program.kill()
        program.communicate()
        wait_until_sync(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)

    def test_ctrl_c_ends_a_program_and_its_worker(self, tmp_path: Path) -> None:
        program = self.run_batch(tmp_path, self.SLOW)
        worker = self.busy(tmp_path)
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=30)
        assert err.count("Traceback") == 1
        assert err.endswith("KeyboardInterrupt\n")
        wait_until_sync(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


class TestWhatIsDecorated:
    def test_a_class_that_a_worker_cannot_find_is_refused(self) -> None:
        @batched()
        class Local:
            def transform(self, items: list[int]) -> list[int]:
                return items

        with pytest.raises(TypeError, match="top of a module"):
            Local()

    def test_a_class_without_transform_is_refused(self) -> None:
        with pytest.raises(TypeError, match="transform"):
            batched()(OddError)  # type: ignore[arg-type]

    async def test_a_class_may_keep_its_name(self) -> None:
        """`LoudModel` is made of `Shout`, which is still there."""
        assert Shout().preprocess(" a ") == "a"

    def test_arguments_that_cannot_be_pickled_are_refused_at_once(self) -> None:
        with pytest.raises(Exception, match="pickle"):
            LoudModel(lambda: None)  # type: ignore[arg-type]

    def test_several_processes_where_several_calls_may_run(self, tmp_path: Path) -> None:
        made = batched(max_size=1, concurrency=2)(Shout)(made_in=tmp_path / "made")
        with made:
            assert len(set((tmp_path / "made").read_text().split())) == 2


def test_a_decorator_does_the_same() -> None:
    made: Any = Slow()
    assert isinstance(made, Batched)
    assert Slow.__doc__ == "Tells of its process, then takes its time."
