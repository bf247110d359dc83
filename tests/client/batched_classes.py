"""Classes for tests of `batched`. Their worker processes import this module.

mypy does not understand a class decorator that changes the class, so most classes are not decorated but
passed to `batched(…)`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dispatcher.batched.decorator import batched


class UnpicklableError(Exception):
    """Error that can be pickled but not unpickled, because it takes two arguments and stores one."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{subject}: {reason}")


class UpperCase:
    """Convert strings to upper case. Some words trigger a fault instead."""

    def __init__(self, suffix: str = "!", *, process_ids_file: Path | None = None) -> None:
        self.suffix = suffix
        self.batch_count = 0
        if process_ids_file is not None:
            with process_ids_file.open("a") as out:
                out.write(f"{os.getpid()}\n")

    def preprocess(self, word: str) -> str:
        if word == "bad before":
            raise ValueError("not before")
        return word.strip()

    def transform(self, words: list[str]) -> list[Any]:
        self.batch_count += 1
        if "die" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if "leave" in words:
            os._exit(3)
        if "exit" in words:
            sys.exit(4)
        if "hang" in words:
            threading.Event().wait()
        if "unpicklable" in words:
            raise UnpicklableError("unpicklable", "as always")
        if "short" in words:
            return []
        return [self.convert(word, len(words)) for word in words]

    def convert(self, word: str, batch_size: int) -> Any:
        match word:
            case "pid":
                return os.getpid()
            case "batches":
                return self.batch_count
            case "together":
                return batch_size
            case "raise":
                raise RuntimeError("raised in transform")
            case "put":
                return KeyError("put in its place")
            case "lambda":
                return lambda: None
        return word.upper()

    def postprocess(self, word: Any) -> Any:
        if word == "BAD AFTER":
            raise ValueError("not after")
        if word == "RETURN IT":
            return KeyError("returned")
        return word + self.suffix if isinstance(word, str) else word


UpperCaseModel = batched(max_size=8, timeout_s=0.05)(UpperCase)


class Double:
    """Has only `transform`, and kills its process if a number is negative."""

    def transform(self, numbers: list[int]) -> list[int]:
        if min(numbers) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [2 * number for number in numbers]


DoubleModel = batched(max_size=64, timeout_s=0.01)(Double)


class FailingConstructor:
    """Class whose instances cannot be created."""

    def __init__(self, fault: str) -> None:
        if fault == "raise":
            raise LookupError("no such model")
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "once" and not Path("made").exists():
            Path("made").touch()
            raise LookupError("not yet")

    def transform(self, items: list[int]) -> list[int]:
        return items


FailingModel = batched()(FailingConstructor)


@batched()
class Slow:
    """Write the process id to each path, then take a long time."""

    def transform(self, paths: list[str]) -> list[str]:
        for path in paths:
            Path(path).write_text(str(os.getpid()))
        time.sleep(600)
        return paths


Item = tuple[int, int, str]
"""Caller, number, and fault."""


class FaultyTransform:
    """Each item has a fault, and each result or error names its item."""

    def transform(self, items: list[Item]) -> list[Any]:
        faults = {fault for _, _, fault in items}
        if "die" in faults:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raise" in faults:
            raise LookupError(*[item for item in items if item[2] == "raise"])
        return [KeyError(item) if item[2] == "put" else ("result", item) for item in items]


FaultyModel = batched(max_size=64, timeout_s=0.005)(FaultyTransform)
