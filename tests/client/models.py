"""Classes under `batched` for tests. Their worker processes import this module.

mypy does not see what a decorator makes of a class, so most are not decorated, but given to `batched(…)`.
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


class OddError(Exception):
    """Pickled, it cannot be made again: it takes two arguments and keeps one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Shout:
    """Strings in capitals. Some words are orders instead."""

    def __init__(self, mark: str = "!", *, made_in: Path | None = None) -> None:
        self.mark = mark
        self.batches = 0
        if made_in is not None:
            with made_in.open("a") as out:
                out.write(f"{os.getpid()}\n")

    def preprocess(self, word: str) -> str:
        if word == "bad before":
            raise ValueError("not before")
        return word.strip()

    def transform(self, words: list[str]) -> list[Any]:
        self.batches += 1
        if "die" in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if "leave" in words:
            os._exit(3)
        if "exit" in words:
            sys.exit(4)
        if "hang" in words:
            threading.Event().wait()
        if "odd" in words:
            raise OddError("odd", "as always")
        if "short" in words:
            return []
        return [self.answer(word, len(words)) for word in words]

    def answer(self, word: str, together: int) -> Any:
        match word:
            case "pid":
                return os.getpid()
            case "batches":
                return self.batches
            case "together":
                return together
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
        return word + self.mark if isinstance(word, str) else word


LoudModel = batched(max_size=8, timeout_s=0.05)(Shout)


class Double:
    """Has `transform` alone, and dies of what is negative."""

    def transform(self, numbers: list[int]) -> list[int]:
        if min(numbers) < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return [2 * number for number in numbers]


Doubling = batched(max_size=64, timeout_s=0.01)(Double)


class Unfit:
    """Cannot be made."""

    def __init__(self, how: str) -> None:
        if how == "raise":
            raise LookupError("no such model")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "once" and not Path("made").exists():
            Path("made").touch()
            raise LookupError("not yet")

    def transform(self, items: list[int]) -> list[int]:
        return items


Broken = batched()(Unfit)


@batched()
class Slow:
    """Tells of its process, then takes its time."""

    def transform(self, paths: list[str]) -> list[str]:
        for path in paths:
            Path(path).write_text(str(os.getpid()))
        time.sleep(600)
        return paths


Item = tuple[int, int, str]
"""Caller, number, and fate."""


class Fated:
    """Each item has its fate, and its outcome tells whose it is."""

    def transform(self, items: list[Item]) -> list[Any]:
        fates = {fate for _, _, fate in items}
        if "die" in fates:
            os.kill(os.getpid(), signal.SIGKILL)
        if "raise" in fates:
            raise LookupError(*[item for item in items if item[2] == "raise"])
        return [KeyError(item) if item[2] == "put" else ("of", item) for item in items]


FatedModel = batched(max_size=64, timeout_s=0.005)(Fated)
