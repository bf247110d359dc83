"""`batched` with classes: one object in a worker process, and what callers get when it fails."""

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
from tests.client.batched_classes import (
    DoubleModel,
    FailingModel,
    Slow,
    UnpicklableError,
    UpperCase,
    UpperCaseModel,
)
from tests.support import wait_until, wait_until_sync

THIS_PROCESS = psutil.Process()


def get_children() -> set[int]:
    return {each.pid for each in THIS_PROCESS.children(recursive=True)}


async def get_outcomes(model: Batched[Any, Any], *items: Any) -> list[Any]:
    """Return the result or error of each caller."""
    return await asyncio.gather(*map(model, items), return_exceptions=True)


async def test_items_pass_all_three_steps_in_another_process(tmp_path: Path) -> None:
    before = get_children()
    async with UpperCaseModel("?", process_ids_file=tmp_path / "process-ids") as model:
        assert await get_outcomes(model, " one ", "two", "three") == ["ONE?", "TWO?", "THREE?"]
        pid = await model("pid")
        assert pid in get_children() - before
        assert await model("batches") == 3
    assert (tmp_path / "process-ids").read_text() == f"{pid}\n", "the object was created once"
    assert get_children() == before


async def test_concurrent_callers_share_calls() -> None:
    async with UpperCaseModel() as model:
        assert await get_outcomes(model, *["together"] * 11) == [8] * 8 + [3] * 3


async def test_process_starts_with_the_first_item_without_a_context_manager() -> None:
    before = get_children()
    model = DoubleModel()
    assert get_children() == before
    assert_type(model, Batched[int, int])
    assert await get_outcomes(model, 1, 2, 3) == [2, 4, 6]
    await model.aclose()
    assert get_children() == before
    with pytest.raises(ClosedError):
        await model(1)


def test_threads_can_call_the_model() -> None:
    with DoubleModel() as model:
        results: dict[int, int] = {}
        threads = [threading.Thread(target=lambda n=n: results.update({n: model.sync(n)})) for n in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {n: 2 * n for n in range(30)}


class TestErrors:
    async def test_each_item_gets_its_own_error(self) -> None:
        async with UpperCaseModel() as model:
            items = ["fine", "bad before", "bad after", "put", "return it", "raise", "lambda", "also fine"]
            outcomes = await get_outcomes(model, *items)
        assert [outcomes[0], outcomes[7]] == ["FINE!", "ALSO FINE!"]
        assert [repr(each) for each in outcomes[1:6]] == [
            "ValueError('not before')",
            "ValueError('not after')",
            "KeyError('put in its place')",
            "KeyError('returned')",
            "RuntimeError('raised in transform')",
        ]
        assert isinstance(outcomes[6], TypeError)
        assert "the result cannot be pickled" in str(outcomes[6])

    @pytest.mark.parametrize("word", ["put", "return it"])
    async def test_returned_exception_is_raised(self, word: str) -> None:
        async with UpperCaseModel() as model:
            with pytest.raises(KeyError):
                await model(word)

    async def test_error_has_the_traceback_of_the_worker(self) -> None:
        async with UpperCaseModel() as model:
            with pytest.raises(RuntimeError) as raised:
                await model("raise")
        [note] = raised.value.__notes__
        assert "In the worker process" in note
        assert "batched_classes.py" in note

    async def test_error_that_cannot_be_unpickled_is_a_batch_error(self) -> None:
        async with UpperCaseModel() as model:
            with pytest.raises(BatchError, match="UnpicklableError: unpicklable: as always") as raised:
                await model("unpicklable")
        assert not isinstance(raised.value, UnpicklableError)

    async def test_item_that_cannot_be_pickled_affects_no_other(self) -> None:
        async with UpperCaseModel() as model:
            outcomes = await get_outcomes(model, "one", lambda: None, "two")
        assert [outcomes[0], outcomes[2]] == ["ONE!", "TWO!"]
        assert "pickle" in str(outcomes[1])

    async def test_missing_results_are_an_error(self) -> None:
        async with UpperCaseModel() as model:
            with pytest.raises(WrongLengthError, match="transform returned 0 results"):
                await model("short")
            assert await model("fine") == "FINE!"

    async def test_sys_exit_in_the_model_ends_its_process(self) -> None:
        async with UpperCaseModel() as model:
            with pytest.raises(WorkerCrashedError, match="exit code 4"):
                await model("exit")
            assert await model("fine") == "FINE!"


class TestCrashes:
    @pytest.mark.parametrize(("word", "cause"), [("die", "SIGKILL"), ("leave", "exit code 3")])
    async def test_crash_fails_only_the_running_items(self, word: str, cause: str, tmp_path: Path) -> None:
        async with UpperCaseModel(process_ids_file=tmp_path / "process-ids") as model:
            first = await model("pid")
            running, waiting = get_outcomes(model, *["a"] * 7, word), get_outcomes(model, "b", "c")
            outcomes, later_outcomes = await asyncio.gather(running, waiting)
            assert {type(each) for each in outcomes} == {WorkerCrashedError}
            assert f"ended by {cause} while it held 8 items" in str(outcomes[0])
            assert later_outcomes == ["B!", "C!"]
            assert await model("pid") != first
        assert len((tmp_path / "process-ids").read_text().split()) == 2, "the batch was not repeated"

    async def test_worker_killed_while_idle_is_replaced(self) -> None:
        async with UpperCaseModel() as model:
            for _ in range(3):
                pid = await model("pid")
                os.kill(pid, signal.SIGKILL)
                assert await model("fine") == "FINE!"
                assert not psutil.pid_exists(pid), "no zombie process is left"

    async def test_error_of_the_constructor_is_raised_for_each_caller(self) -> None:
        model = FailingModel("raise")
        for _ in range(2):
            outcomes = await get_outcomes(model, 1, 2)
            assert [repr(each) for each in outcomes] == ["LookupError('no such model')"] * 2
        await model.aclose()

    async def test_crash_of_the_constructor_is_raised_for_each_caller(self) -> None:
        before = get_children()
        model = FailingModel("die")
        with pytest.raises(WorkerCrashedError, match="SIGKILL before it was ready"):
            await model(1)
        await model.aclose()
        assert get_children() == before

    async def test_failed_constructor_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        model = FailingModel("once")
        with pytest.raises(LookupError, match="not yet"):
            await model(1)
        assert await model(1) == 1
        await model.aclose()

    async def test_entering_raises_the_error_of_the_constructor(self) -> None:
        before, threads = get_children(), threading.active_count()
        with pytest.raises(LookupError, match="no such model"):
            async with FailingModel("raise"):
                pytest.fail("the block was entered")
        with pytest.raises(LookupError, match="no such model"), FailingModel("raise"):
            pytest.fail("the block was entered")
        assert get_children() == before
        await wait_until(lambda: threading.active_count() <= threads + 1)  # the thread of asyncio


class TestShutdown:
    async def test_worker_ends_when_its_model_is_garbage_collected(self) -> None:
        before = get_children()
        model = DoubleModel()
        assert await model(1) == 2
        assert get_children() != before
        del model
        gc.collect()
        # Children of earlier tests may end as well.
        await wait_until(lambda: get_children() <= before)

    async def test_closing_waits_for_running_items(self) -> None:
        model = UpperCaseModel()
        tasks = [asyncio.create_task(model("word")) for _ in range(20)]
        await asyncio.sleep(0)
        await model.aclose()
        assert await asyncio.gather(*tasks) == ["WORD!"] * 20

    async def test_ctrl_c_does_not_end_the_worker(self) -> None:
        """A terminal sends the signal to all processes; the program decides what follows."""
        async with UpperCaseModel() as model:
            pid = await model("pid")
            os.kill(pid, signal.SIGINT)
            assert await model("pid") == pid

    def run_program(self, tmp_path: Path, code: str) -> subprocess.Popen[str]:
        """Start a program that uses a model."""
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

    def test_program_leaves_no_worker(self, tmp_path: Path) -> None:
        """The program defines the class and creates the model at its top level; the worker must not run that
        again."""
        program = self.run_program(
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

    SLOW_PROGRAM = """
        from tests.client.batched_classes import Slow

        if __name__ == "__main__":
            Slow().sync("busy")
    """

    def test_program_without_main_guard_gets_a_hint(self, tmp_path: Path) -> None:
        program = self.run_program(
            tmp_path, "from tests.client.batched_classes import Slow; Slow().sync('busy')"
        )
        _, err = program.communicate(timeout=30)
        assert "if __name__ == '__main__':" in err
        assert "WorkerCrashedError" in err.splitlines()[-1]
        assert not (tmp_path / "busy").exists()

    def wait_for_worker(self, tmp_path: Path) -> psutil.Process:
        process_id_file = tmp_path / "busy"
        wait_until_sync(lambda: process_id_file.exists() and process_id_file.read_text(), timeout_s=30)
        return psutil.Process(int(process_id_file.read_text()))

    def test_killed_program_ends_its_worker(self, tmp_path: Path) -> None:
        program = self.run_program(tmp_path, self.SLOW_PROGRAM)
        worker = self.wait_for_worker(tmp_path)
        program.kill()
        program.communicate()
        wait_until_sync(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)

    def test_ctrl_c_ends_a_program_and_its_worker(self, tmp_path: Path) -> None:
        program = self.run_program(tmp_path, self.SLOW_PROGRAM)
        worker = self.wait_for_worker(tmp_path)
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=30)
        assert err.count("Traceback") == 1
        assert err.endswith("KeyboardInterrupt\n")
        wait_until_sync(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


class TestDecorator:
    def test_local_class_is_rejected(self) -> None:
        @batched()
        class Local:
            def transform(self, items: list[int]) -> list[int]:
                return items

        with pytest.raises(TypeError, match="top of a module"):
            Local()

    def test_class_without_transform_is_rejected(self) -> None:
        with pytest.raises(TypeError, match="transform"):
            batched()(UnpicklableError)  # type: ignore[arg-type]

    async def test_undecorated_class_stays_usable(self) -> None:
        """`UpperCaseModel` is a batched class made from `UpperCase`, which can still be used directly."""
        assert UpperCase().preprocess(" a ") == "a"

    def test_arguments_that_cannot_be_pickled_are_rejected_at_once(self) -> None:
        with pytest.raises(Exception, match="pickle"):
            UpperCaseModel(lambda: None)  # type: ignore[arg-type]


def test_class_can_be_decorated_with_decorator_syntax() -> None:
    model: Any = Slow()
    assert isinstance(model, Batched)
    assert Slow.__doc__ == "Write the process id to each path, then take a long time."
