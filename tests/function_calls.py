"""Number of function calls of some code, in a new interpreter or in this one.

The number measures the cost of an import or of a command more reliably than CPU time: on a machine with other
load, the same import took 20 % more CPU time than the import of another package, or 37 %.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType

import dispatcher

COUNT_CALLS = """
import sys

count = 0

def count_call(frame, event, argument):
    global count
    count += event in ("call", "c_call")

sys.setprofile(count_call)
{code}
sys.setprofile(None)
print(count)
"""


def run_python(code: str, environ: Mapping[str, str] = os.environ) -> str:
    """Run the code in a new interpreter and return what it printed to stdout."""
    # Modules are compiled and kept for the next run, even if this environment turns that off.
    env = {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env).stdout


def count_calls(code: str, preparation: str = "", environ: Mapping[str, str] = os.environ) -> int:
    """Return how many functions the code calls, after the code of `preparation` ran without being counted."""
    program = preparation + COUNT_CALLS.format(code=code)
    run_python(program, environ)  # compiles the modules
    return int(run_python(program, environ).splitlines()[-1])


class CallCounter:
    """Counts calls of Python and C functions, which does not depend on the machine and its load."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self) -> float:
        return float(self._count)

    def _count_call(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            self._count += 1

    @contextmanager
    def count(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._count_call)
        try:
            yield
        finally:
            sys.setprofile(before)


class ProductCallCounter(CallCounter):
    """Counts calls of functions of the product, and calls of C functions by them.

    Libraries and the lab do not count, so that another version of a library or another queue in memory
    leaves the number as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: set[str] = set()
        """Modules whose functions were called, as paths below `dispatcher`."""
        self._names: dict[CodeType, str] = {}
        """Path of the module of each code object. Empty if it does not count."""

    def _count_call(self, frame: FrameType, event: str, _argument: object) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = _find_module(code)
        if name:
            self._count += 1
            self.modules.add(name)


def _find_module(code: CodeType) -> str:
    """Return the path of the module of a function below `dispatcher`. Empty if its calls do not count."""
    prefix = f"{dispatcher.__path__[0]}{os.sep}"
    name = code.co_filename.removeprefix(prefix)
    return "" if name == code.co_filename or name.startswith(f"lab{os.sep}") else name
