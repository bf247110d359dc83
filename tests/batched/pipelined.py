"""Classes with hooks under `batched`. Worker processes import this module."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dispatcher.batched.worker_index import worker_index
from tests.client.batched_classes import FaultyTransform, Item

Visit = tuple[Path, int]
"""A folder that all stages share, and the number of an item."""
MAX_WAIT_S = 60


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll a condition. The helpers of other tests are not used, because each worker process would import
    them."""
    deadline = time.monotonic() + MAX_WAIT_S
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError("another stage or worker did not come")
        time.sleep(0.01)


def meet(folder: Path, name: str, names: set[str]) -> None:
    """Return when each of these names has come to the folder. Raises an error if one does not come."""
    (folder / name).touch()
    wait_for(lambda: names <= {path.name for path in folder.iterdir()})


class MeetingStages:
    """Each stage waits for two others: `preprocess` of item 2, `transform` of item 1 and `postprocess` of
    item 0 return only if all three run at the same time."""

    @staticmethod
    def visit(stage: str, visit: Visit) -> None:
        folder, number = visit
        if (stage, number) in (("preprocess", 2), ("transform", 1), ("postprocess", 0)):
            meet(folder, stage, {"preprocess", "transform", "postprocess"})

    @classmethod
    def preprocess(cls, visit: Visit) -> Visit:
        cls.visit("preprocess", visit)
        return visit

    def transform(self, visits: list[Visit]) -> list[Visit]:
        for visit in visits:
            self.visit("transform", visit)
        return visits

    @classmethod
    def postprocess(cls, visit: Visit) -> int:
        cls.visit("postprocess", visit)
        return visit[1]


class StageLog:
    """Record what each stage of a process runs, and fail if a stage has two batches at once."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[int]] = {"preprocess": [], "transform": [], "postprocess": []}
        self.busy = {name: threading.Lock() for name in self.numbers}
        self.max_between = 0

    def run(self, stage: str, numbers: list[int]) -> list[int]:
        assert self.busy[stage].acquire(blocking=False), f"two batches in {stage}"
        self.numbers[stage] += numbers
        begun, ended = len(self.numbers["preprocess"]), len(self.numbers["postprocess"])
        self.max_between = max(self.max_between, begun - ended)
        time.sleep(0.001 * (numbers[0] % 3))
        self.busy[stage].release()
        return numbers


class LoggedStages:
    """Hooks of lists that record what they run. The item -1 returns the log."""

    log = StageLog()

    @classmethod
    def preprocess(cls, numbers: list[int]) -> list[int]:
        return cls.log.run("preprocess", numbers)

    def transform(self, numbers: list[int]) -> list[int]:
        return self.log.run("transform", numbers)

    @classmethod
    def postprocess(cls, numbers: list[int]) -> list[Any]:
        cls.log.run("postprocess", numbers)
        return [(cls.log.numbers, cls.log.max_between) if each == -1 else each for each in numbers]


class FatalStage:
    """Kill the worker process in a stage if an item says so, and record each run of each item in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def visit(self, stage: str, item: tuple[int, str]) -> None:
        with self.file.open("a") as out:
            out.write(f"{stage} {item[0]}\n")
        if item[1] == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    def preprocess(self, item: tuple[int, str]) -> tuple[int, str]:
        self.visit("preprocess", item)
        return item

    def transform(self, items: list[tuple[int, str]]) -> list[tuple[int, str]]:
        for item in items:
            self.visit("transform", item)
        return items

    def postprocess(self, item: tuple[int, str]) -> int:
        self.visit("postprocess", item)
        return item[0]


FatalVisit = tuple[int, Path]
"""Number of an item, and the folder of its test."""


class FatalTransform:
    """`transform` of item 0 kills the worker process when item 1 has been preprocessed."""

    @classmethod
    def preprocess(cls, visit: FatalVisit) -> FatalVisit:
        number, folder = visit
        with (folder / f"preprocessed {number}").open("a") as out:
            out.write("once\n")
        return visit

    def transform(self, visits: list[FatalVisit]) -> list[int]:
        for number, folder in visits:
            if number == 0:
                wait_for((folder / "preprocessed 1").exists)
                os.kill(os.getpid(), signal.SIGKILL)
        return [number for number, _ in visits]


class Words:
    """Hooks of lists, the second of which gets the input of `transform` as well."""

    def preprocess(self, words: list[str]) -> list[Any]:
        if "bad before" in words:
            raise ValueError("not before")
        if "short before" in words:
            return words[1:]
        return [KeyError("before") if word == "key" else word.strip() for word in words]

    def transform(self, words: list[str]) -> list[Any]:
        if "bad" in words:
            raise ValueError("not in transform")
        return [len(word) for word in words]

    def postprocess(self, words: list[str], lengths: list[int]) -> list[Any]:
        if "bad after" in words:
            raise ValueError("not after")
        return [f"{word}: {length}" for word, length in zip(words, lengths, strict=True)]


class WordsOneByOne:
    """The same with hooks of one item, which can run in either process."""

    @staticmethod
    def preprocess(word: str) -> str:
        if word == "exit":
            sys.exit(7)
        return word.strip()

    def transform(self, words: list[str]) -> list[int]:
        return [len(word) for word in words]

    @staticmethod
    def postprocess(word: str, length: int) -> tuple[str, int]:
        return (f"{word}: {length}", os.getpid())


class SleepingStages:
    """Each stage takes a number of seconds for a batch."""

    def __init__(self, stage_s: float) -> None:
        self.stage_s = stage_s

    def preprocess(self, items: list[int]) -> list[int]:
        time.sleep(self.stage_s)
        return items

    transform = postprocess = preprocess


class SleepingTransform:
    """The same without hooks: `transform` takes the time of all three stages."""

    def __init__(self, stage_s: float) -> None:
        self.stage_s = stage_s

    def transform(self, items: list[int]) -> list[int]:
        time.sleep(3 * self.stage_s)
        return items


class FaultyStages(FaultyTransform):
    """`FaultyTransform` with hooks, which can run in either process."""

    @staticmethod
    def preprocess(item: Item) -> tuple[Item]:
        return (item,)

    def transform(self, items: list[Any]) -> list[Any]:
        return super().transform([item for (item,) in items])

    @staticmethod
    def postprocess(prepared: tuple[Item], result: Any) -> Any:
        assert result == ("result", *prepared)
        return result


class IndexedWorker:
    """Return index and process of the worker. Items of a pair return when both run."""

    def __init__(self) -> None:
        self.index = worker_index()

    def transform(self, items: list[tuple[Path, str, str] | None]) -> list[tuple[int, int]]:
        for item in items:
            if item is not None:
                folder, name, other = item
                meet(folder, name, {name, other})
        return [(self.index, os.getpid()) for _ in items]
