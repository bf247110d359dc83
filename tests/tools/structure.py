"""Measure the structure of the program: what a restructuring compares before and after.

    python -m tests.tools.structure            prints a table (make structure)
    python -m tests.tools.structure --modules  prints the modules on each way, too

The counts of features are those of words in the code, not in comments and docstrings, so that a feature that
is mentioned does not count as one that is woven in.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import re
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import typer
from aiohttp import web

from dispatcher.cli import app
from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.kernel import Dispatcher, Journal
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import ClaimResult, Settlement, SettleStatus
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.redis import lua_scripts
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import RedisQueue
from dispatcher.service.loop_options import build_options
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.readings import list_possible_signals
from dispatcher.signals.sources import build_sources
from dispatcher.telemetry.events import divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.function_calls import ProductCallCounter
from tests.kernel.plain_requests import ANSWER, default_settings, encode_plain_request, run_plain_requests
from tests.paths import DOCS, PACKAGE, ROOT
from tests.queue.factories import NAMES, queues
from tests.queue.servers import server
from tests.signals.fakes import fake_epp, serving

FEATURES = {
    "sequences": r"\w*(?<!con)sequence\w*|turn_?(?:end|granted|waits|rejected|checker|decision)\w*"
    r"|\w*(?:claim|granted|end)_turns?\w*",
    "slices": r"(?!slice\b)\w*(?<!time_)slic(?:e|es|ed|er|ing)(?:_\w+)?"
    r"|(?:stored|store|load|delete|check|has)_progress\w*|progress_(?:bytes|field|start|key)\w*",
    "models": r"model_(?:router|terms|registry|requests|watch)\w*"
    r"|\w*(?:warm_?ups?|missing_model|waiting_for_model)\w*",
    "merging": r"\w*(?:merg(?:e|es|ed|er|ing)|batching)(?:_\w+)?",
}
"""Words of each feature, as a pattern of names in lower case. The key is the name of its folders. Words that
the kernel may use are not among them: a typing `Sequence`, the `model` of a body, a Python `slice`."""
APART = {"lab", "batched"}
"""Folders that are no part of the dispatcher."""
TYPING_SEQUENCE = re.compile(r"\bSequence\b(?= \[)|(?<=import)(?: \w+ ,)* Sequence\b")
MAX_PARAMETERS = 7


# The way of a request and of a reading.


def trace_plain_request() -> set[str]:
    """Return the modules that a plain request enters in the loop, from its claim to its result."""
    counter, found = ProductCallCounter(), set[str]()

    def keep_modules() -> None:
        found.update(counter.modules)

    with counter.count():
        # The request runs between two turns of the tasks that run each second.
        run_plain_requests(
            1, answer_s=0.01, start_s=5.3, on_claimed=counter.modules.clear, on_settle=keep_modules
        )
    return found


class TracedQueue(RedisQueue):
    """Queue on a server that records the modules entered from the begin of a claim to the end of its
    settlement."""

    counter: ProductCallCounter
    found: set[str]

    async def claim(self, *arguments: Any, **options: Any) -> ClaimResult:
        self.counter.modules.clear()
        return await super().claim(*arguments, **options)

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleStatus | None]:
        statuses = await super().settle(settlements)
        self.found = set(self.counter.modules)
        return statuses


async def trace_files_of_plain_request() -> tuple[set[str], set[str]]:
    """Return the Python modules and the Lua files that a plain request passes with Redis and HTTP."""
    scripts: list[str] = []
    run_script = Backend.run_script

    async def record_script(self: Backend, name: str, *arguments: Any, **options: Any) -> Any:
        scripts.append(name)
        return await run_script(self, name, *arguments, **options)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=ANSWER.body, content_type="application/json")

    with tempfile.TemporaryDirectory() as folder, server("valkey", Path(folder)) as engine:
        async with serving(answer) as port, queues(engine.url, "producer") as (producer,):
            settings = default_settings(gateway={"url": f"http://127.0.0.1:{port}"})
            gateway = HttpGateway(settings.gateway)
            await gateway.prepare()
            limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
            now = asyncio.get_running_loop().time()
            limiter.add_reading(Reading(Signal.REQUESTS, now, now, 0.0, 0.0, 10), now)
            queue = TracedQueue(connect(engine.url), NAMES, "traced")
            queue.counter, queue.found = ProductCallCounter(), set()
            options = build_options(settings, observe=False)
            journal = Journal(Metrics("qwen"))
            dispatcher = Dispatcher(queue, gateway, limiter, options, journal)
            task = asyncio.create_task(dispatcher.run())
            await asyncio.sleep(1.3)  # until the tasks that run each second have run
            with patch.object(Backend, "run_script", record_script), queue.counter.count():
                await producer.submit([encode_plain_request(1)])
                while not queue.found:  # noqa: ASYNC110 - nothing tells when
                    await asyncio.sleep(0.01)
            dispatcher.drain(0.0)
            await task
            await gateway.aclose()
            await queue.aclose()
    used = {
        part
        for name in ("claim", "check_cancelled", "settle")
        for part in (name, *lua_scripts._collect_used(name, ALL_FEATURES))
    }
    assert {"claim", "check_cancelled", "settle"} <= {*scripts}
    return queue.found, used


async def trace_reading() -> set[str]:
    """Return the modules that a reading enters from the scrape to the limit."""
    counter, found = ProductCallCounter(), set[str]()
    polled = asyncio.Event()
    async with fake_epp() as epp:
        settings = default_settings(signals={"source": "epp", "interval_s": 1.0, "epp": {"urls": [epp.url]}})
        limiter = Limiter(settings.limit_policy(), list_possible_signals(settings.signals.use))

        def apply_poll(poll: SourcePoll) -> None:
            now = asyncio.get_running_loop().time()
            limiter.apply_poll(poll, now)
            limiter.get_allowance(now)
            found.update(counter.modules)
            polled.set()

        poller = Poller(build_sources(settings), settings.signals, settings.limit_policy(), apply_poll)
        with counter.count():
            task = asyncio.create_task(poller.run())
            await polled.wait()
        task.cancel()
    return found


# The source.


def find_code_lines(path: Path) -> dict[int, str]:
    """Return the names and operators of each line with code, without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    ignored = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in ignored and token.start[0] not in docstrings:
            for line in range(token.start[0], token.end[0] + 1):
                lines[line] = f"{lines.get(line, '')} {token.string if line == token.start[0] else ''}"
    return lines


def list_modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def find_lua_lines(path: Path) -> dict[int, str]:
    lines = (line.partition("--")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {number: line for number, line in enumerate(lines, 1) if line}


def count_woven_lines(feature: str) -> str:
    """Return the number of files outside the folders of the feature that have its words, and of these lines:
    of Python, and of Lua."""
    words = re.compile(rf"\b(?:{FEATURES[feature]})\b")
    counts = []
    for paths, find_lines in ((list_modules(), find_code_lines), (PACKAGE.rglob("*.lua"), find_lua_lines)):
        found = []
        for path in paths:
            if {feature, *APART}.isdisjoint(path.relative_to(PACKAGE).parent.parts):
                lines = [TYPING_SEQUENCE.sub("", line).lower() for line in find_lines(path).values()]
                found.append(sum(bool(words.search(line)) for line in lines))
        counts.append(f"{sum(count > 0 for count in found)} ({sum(found)})")
    return ", ".join(counts)


def list_long_constructors() -> Iterator[tuple[str, int]]:
    """Yield the constructors with more than MAX_PARAMETERS parameters."""
    for path in list_modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                        arguments = method.args
                        count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]) - 1
                        if count > MAX_PARAMETERS:
                            yield f"{path.relative_to(PACKAGE)} {node.name}", count


def count_lines(folder: Path, *endings: str) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in folder.rglob("*")
        if path.is_file() and path.suffix in endings
    )


def list_commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, with its name."""
    context = typer.Context(group)
    for sub in group.list_commands(context):
        command, sub_name = group.get_command(context, sub), f"{name} {sub}".strip()
        if hasattr(command, "list_commands"):
            yield from list_commands(command, sub_name)
        else:
            yield sub_name, command


# The table.


def build_rows(*, shows_modules: bool) -> Iterator[tuple[str, str]]:
    with divert_events(lambda _event, _fields: None):
        loop_modules = trace_plain_request()
        modules, lua_files = asyncio.run(trace_files_of_plain_request())
        reading_modules = asyncio.run(trace_reading())
    for what, found in (
        ("modules entered between claim and result: loop", loop_modules),
        ("… with Redis and HTTP", modules),
        ("Lua files of claim, check_cancelled and settle", lua_files),
        ("modules entered between scrape and limit", reading_modules),
    ):
        yield (
            what,
            f"{len(found)}" + ("".join(f"\n    {name}" for name in sorted(found)) if shows_modules else ""),
        )
    for feature in FEATURES:
        yield f"files (lines) outside its folder, Python, Lua: {feature}", count_woven_lines(feature)
    long = sorted(list_long_constructors(), key=lambda each: -each[1])
    yield f"constructors with more than {MAX_PARAMETERS} parameters", str(len(long))
    for name, count in long[:5]:
        yield f"    {name}", str(count)
    code = {path: len(find_code_lines(path)) for path in list_modules()}
    for folder in sorted({path.relative_to(PACKAGE).parts[0] for path in code if path.parent != PACKAGE}):
        yield (
            f"lines of code: {folder}",
            str(sum(count for path, count in code.items() if PACKAGE / folder in path.parents)),
        )
    yield "lines of code: all (modules)", f"{sum(code.values())} ({len(code)})"
    yield "lines of Lua, JavaScript", f"{count_lines(PACKAGE, '.lua')}, {count_lines(PACKAGE, '.js')}"
    yield "lines of tests", str(count_lines(ROOT / "tests", ".py"))
    yield "lines of docs", str(count_lines(DOCS, ".md"))
    configuration = (DOCS / "reference" / "configuration.md").read_text(encoding="utf-8")
    yield "settings", str(len(re.findall(r"^\| `", configuration, re.MULTILINE)))
    commands = dict(list_commands(typer.main.get_command(app)))
    yield "verbs", str(len(commands))
    options = {
        name: [each for each in command.params if each.name != "help"] for name, command in commands.items()
    }
    yield "options and arguments of all verbs", str(sum(map(len, options.values())))
    yield "options and arguments of simulate", str(len(options.get("simulate", [])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modules", action="store_true", help="print the modules on both ways, too")
    rows = list(build_rows(shows_modules=parser.parse_args().modules))
    width = max(len(what) for what, _ in rows)
    for what, value in rows:
        print(f"{what:{width}}  {value}")


if __name__ == "__main__":
    main()
