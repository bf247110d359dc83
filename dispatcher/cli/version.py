"""`batch-dispatcher version`: print the versions of the dispatcher and of Python."""

from __future__ import annotations

import json
import platform
from typing import Annotated

import typer

from dispatcher import __version__

EXAMPLES = {"version": ["batch-dispatcher version", "batch-dispatcher version --json"]}


def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the version of the dispatcher and of the Python it runs on."""
    if as_json:
        typer.echo(json.dumps({"version": __version__, "python": platform.python_version()}))
    else:
        typer.echo(f"batch-dispatcher {__version__} (Python {platform.python_version()})")
