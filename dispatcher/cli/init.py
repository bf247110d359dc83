"""`batch-dispatcher init`: a first configuration, of a few answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.cli.screen import answer, complain, fail, say, warn
from dispatcher.cli.target import Json
from dispatcher.settings import Settings, parse

EXAMPLES = {
    "init": [
        "batch-dispatcher init                # asks",
        "batch-dispatcher init --from-cluster --namespace llm",
        "batch-dispatcher init --pool qwen --gateway http://127.0.0.1:8000 --epp http://127.0.0.1:9090",
    ]
}
_OPTIONS = {
    "gateway.url": "--gateway (gateway.url)",
    "signals.epp.urls[0]": "--epp (signals.epp.urls[0])",
    "queue.url": "--queue-url (queue.url)",
    "pool.name": "--pool (pool.name)",
    "pool.namespace": "--namespace (pool.namespace)",
}
"""By which option a setting is given here."""
_BARE = re.compile(r"[A-Za-z][\w./:-]*\w|\w")


@dataclass(frozen=True, slots=True)
class Answers:
    """What a first configuration is made of; empty: left at its default."""

    gateway: str
    pool: str = "default"
    namespace: str = "default"
    objective: str = ""
    queue: str = ""
    epp: str = ""
    per_endpoint: int | None = None
    reserve: float = 0.05


def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="What to write.")] = Path(
        "config.yaml"
    ),
    pool: Annotated[str, typer.Option(metavar="NAME", help="The InferencePool.")] = "",
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Its namespace.")] = "",
    gateway: Annotated[str, typer.Option(metavar="URL", help="Where requests go.")] = "",
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="An InferenceObjective with a negative priority.")
    ] = "",
    queue_url: Annotated[
        str, typer.Option(metavar="URL", help="redis://… of the queue. Default: a Valkey of our own.")
    ] = "",
    epp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The endpoint picker's metrics. Default: found through the pool, in a cluster.",
        ),
    ] = "",
    per_endpoint: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Requests that one model server runs at once (vLLM: --max-num-seqs)."
        ),
    ] = None,
    reserve: Annotated[
        float,
        typer.Option(metavar="N", min=0, max=0.99, help="Share of the capacity that batch work never takes."),
    ] = 0.05,
    from_cluster: Annotated[
        bool, typer.Option("--from-cluster", help="Ask kubectl for pool, gateway and objective.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Write a commented configuration, of options or, on a terminal, of a few questions.

    An existing file is never overwritten. Exit code 1: it exists, or the cluster cannot be asked; 2: an
    answer is wrong or missing.
    """
    if output.exists():
        raise fail(f"{output} exists and is not overwritten: name another with --output")
    if from_cluster:
        pool, namespace, gateway, objective = _in_cluster(pool, namespace, gateway, objective)
    asked = sys.stdin.isatty() and not json_output
    if asked and not from_cluster:
        pool = pool or typer.prompt("Name of the InferencePool", "default")
    if asked and not gateway:
        gateway = typer.prompt("URL of the inference gateway", value_proc=_http)
    if asked and not from_cluster:
        objective = objective or _optional("InferenceObjective with a negative priority")
        queue_url = queue_url or _optional("redis://… of the queue (none: a Valkey of our own)")
        epp = epp or _optional("URL of the endpoint picker's metrics (none: found through the pool)", _http)
    if not gateway:
        raise fail("no gateway is named: give --gateway URL", 2)
    secret = "@" in queue_url
    answers = Answers(
        gateway,
        pool or "default",
        namespace or "default",
        objective,
        "" if secret else queue_url,
        epp,
        per_endpoint,
        reserve,
    )
    text = written(answers, secret=secret)
    found = parse(text, {}, name=str(output))
    if not isinstance(found, Settings):
        # No file is written, so its name and lines would mean nothing.
        bare = (
            replace(each, source="", line=None, where=_OPTIONS.get(each.where, each.where)) for each in found
        )
        complain(*map(str, bare))
        raise typer.Exit(2)
    try:
        with output.open("x") as file:
            file.write(text)
    except OSError as error:
        raise fail(f"{output}: {error.strerror or error}") from error
    if secret:
        warn("the queue's URL holds a password and is not in the file: export BATCH_DISPATCHER__QUEUE__URL")
    if json_output:
        answer({"written": str(output), "pool": answers.pool, "gateway": answers.gateway})
    else:
        option = "" if output == Path("config.yaml") else f" --config {output}"
        say(f"{output} is written. Next: batch-dispatcher check{option}")


def _optional(question: str, checked: Callable[[str], str] = str.strip) -> str:
    told: str = typer.prompt(
        question, "", show_default=False, value_proc=lambda given: given and checked(given)
    )
    return told


def _http(given: str) -> str:
    """What was answered, as a URL; what is none is asked for again."""
    if not given.strip().startswith(("http://", "https://")):
        raise typer.BadParameter("it must begin with http:// or https://")
    return given.strip()


def _in_cluster(pool: str, namespace: str, gateway: str, objective: str) -> tuple[str, str, str, str]:
    from dispatcher.cli.kubectl import KubectlError, pools

    try:
        there = [each for each in pools(namespace) if pool in ("", each.name)]
    except KubectlError as error:
        raise fail(str(error)) from error
    if not there:
        raise fail(f"no InferencePool {pool or 'at all'} in {namespace or 'any namespace'}")
    if len(there) > 1:
        names = ", ".join(f"{each.namespace}/{each.name}" for each in there)
        raise fail(f"there are several: {names}. Choose by --pool and --namespace", 2)
    one = there[0]
    if not one.gateway and not gateway:
        warn(f"no gateway was found whose HTTPRoute leads to {one.name}")
    return one.name, one.namespace, gateway or one.gateway, objective or one.objective


def written(answers: Answers, *, secret: bool = False) -> str:
    """The file."""
    queue = "  # url: is in $BATCH_DISPATCHER__QUEUE__URL, for it holds a password"
    if not secret:
        queue = f"  url: {_scalar(answers.queue)}" if answers.queue else "  # url: redis://redis:6379"
    objective = f"objective: {_scalar(answers.objective)}" if answers.objective else "# objective: batch"
    epp = f"urls: [{json.dumps(answers.epp)}]" if answers.epp else '# urls: ["http://127.0.0.1:9090"]'
    each = answers.per_endpoint
    per_endpoint = f"per_endpoint: {each}" if each is not None else "# per_endpoint: 256"
    return f"""\
# The batch dispatcher's configuration. Every setting: docs/configuration.md.
# Check it: batch-dispatcher check. Watch it before you trust it: batch-dispatcher run --observe.

pool:
  name: {_scalar(answers.pool)}    # your InferencePool; it names the queue, too
  namespace: {_scalar(answers.namespace)}

gateway:
  url: {_scalar(answers.gateway)}
  # An InferenceObjective with a negative priority: without one batch work competes with everybody.
  {objective}

queue:
  # Without a URL: a Valkey of our own beside the dispatcher, for one dispatcher. Passwords belong in
  # the environment: BATCH_DISPATCHER__QUEUE__URL=redis://:secret@redis
{queue}
  # data_dir: ./batch-dispatcher-data    # of that Valkey, relative to this file

signals:
  # How full the pool is. In a cluster leave all of it out: the endpoint picker is found through the pool.
  epp:
    {epp}
  # prometheus:
  #   url: http://prometheus:9090
  # vllm:    # with neither: the model servers' own pages (vLLM, SGLang, TensorRT-LLM)
  #   urls: ["http://127.0.0.1:8000"]    # or service: the DNS name of a headless Service

budget:
  reserve: {answers.reserve:g}    # share of the capacity that batch work never takes; takes effect at once
  # Requests that one model server runs at once (vLLM: --max-num-seqs). Default: what the picker shows.
  {per_endpoint}

# admin:
#   port: 8080    # health, metrics, status and the page, on this machine alone
"""


def _scalar(text: str) -> str:
    return (
        text if _BARE.fullmatch(text) and text.lower() not in ("null", "true", "false") else json.dumps(text)
    )
