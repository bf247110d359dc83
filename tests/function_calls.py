"""Number of function calls of some code in a new interpreter.

The number measures the cost of an import or of a command more reliably than CPU time: on a machine with other
load, the same import took 20 % more CPU time than the import of another package, or 37 %.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

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
