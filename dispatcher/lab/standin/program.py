"""Options of the programs of the stand-ins, and running until a signal."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

C = TypeVar("C", bound=msgspec.Struct)
S = TypeVar("S")


def parse_options(
    kind: type[C], arguments: Sequence[str] | None, program: str, about: str | None, json_field: str = ""
) -> C:
    """Return a configuration, of which each field is an option. The value of `json_field` is a JSON object.

    Exits with 2 if the options are invalid.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in msgspec.structs.fields(kind):
        described, *then = field.type.__metadata__
        default = then[0] if then else msgspec.json.encode(field.default).decode().strip('"')
        help_text = f"{described.description} Default: {default}".replace("%", "%%")
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=None, help=help_text)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    try:
        if json_field in given:
            given[json_field] = msgspec.json.decode(given[json_field])
        # Not strict: options are strings that msgspec converts to the types of the fields.
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    except msgspec.DecodeError as error:
        parser.error(f"{json_field}: not JSON: {error}")


async def serve(world: AbstractAsyncContextManager[S], get_urls: Callable[[S], dict[str, Any]]) -> None:
    """Run until SIGTERM or SIGINT. One line of JSON on stdout with the URLs says that the world listens."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with world as open_world:
        sys.stdout.write(msgspec.json.encode(get_urls(open_world)).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()
