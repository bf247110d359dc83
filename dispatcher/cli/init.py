"""`batch-dispatcher init`: write a first configuration from options or answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from dispatcher.cli.connection import Json
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines, print_warning

EXAMPLES = {
    "init": [
        "batch-dispatcher init                # asks",
        "batch-dispatcher init --from-cluster --namespace llm",
        "batch-dispatcher init --pool qwen --gateway http://127.0.0.1:8000 --epp http://127.0.0.1:9090",
        "batch-dispatcher init --pool qwen --server http://127.0.0.1:8000 --per-endpoint 256",
        "batch-dispatcher init --pool qwen --gateway http://127.0.0.1:8000 --fixed-limit 16",
    ]
}
Way = Literal["epp", "servers", "prometheus", "fixed"]
"""Source from which the dispatcher learns how full the pool is."""
_WAYS_HELP = (
    "How full the pool is can be read from:",
    "  epp         the endpoint picker of llm-d or of the Gateway API Inference Extension",
    "  servers     plain model servers: vLLM, SGLang, TensorRT-LLM",
    "  prometheus  a Prometheus that has the endpoint picker's series",
    "  fixed       nothing: a fixed limit, which does not follow other users' load",
)
_OPTION_OF_SETTING = {
    "gateway.url": "--gateway (gateway.url)",
    "signals.epp.urls[0]": "--epp (signals.epp.urls[0])",
    "signals.prometheus.url": "--prometheus (signals.prometheus.url)",
    "signals.vllm.urls": "--server (signals.vllm.urls)",
    "queue.url": "--queue-url (queue.url)",
    "pool.name": "--pool (pool.name)",
    "pool.namespace": "--namespace (pool.namespace)",
}
"""Option of `init` for each setting, to name the option in error messages."""
# Plain YAML scalars. Anything else is quoted as JSON, which is also valid YAML.
_BARE_SCALAR = re.compile(r"[A-Za-z][\w./:-]*\w|\w")


@dataclass(frozen=True, slots=True)
class Answers:
    """Values of a first configuration. Empty fields are left at the defaults of the settings."""

    gateway: str
    pool: str = "default"
    namespace: str = "default"
    objective: str = ""
    queue: str = ""
    epp: str = ""
    per_endpoint: int | None = None
    reserve: float = 0.05
    way: Way = "epp"
    servers: tuple[str, ...] = ()
    prometheus: str = ""
    fixed_limit: int | None = None

    @property
    def has_inference_pool(self) -> bool:
        """True if the model servers are in an InferencePool."""
        return self.way in ("epp", "prometheus")


def init(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")] = Path(
        "config.yaml"
    ),
    pool: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the InferencePool, and of the queue.")
    ] = "",
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Namespace of the InferencePool.")] = "",
    gateway: Annotated[
        str,
        typer.Option(
            metavar="URL", help="URL that requests are sent to. Default: the --server, if there is one."
        ),
    ] = "",
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="An InferenceObjective with a negative priority.")
    ] = "",
    queue_url: Annotated[
        str, typer.Option(metavar="URL", help="URL of the queue (redis://…). Default: an embedded Valkey.")
    ] = "",
    epp: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="URL of the endpoint picker's metrics. Default: found through the pool, in a cluster.",
        ),
    ] = "",
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="URL of a model server (vLLM, SGLang, TensorRT-LLM); its metrics are read. May be repeated.",
        ),
    ] = None,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="URL of a Prometheus that has the endpoint picker's series.")
    ] = "",
    fixed_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Read nothing: at most N requests in flight, no matter what others send."
        ),
    ] = None,
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
    """Write a commented configuration, from options or from a few questions.

    Questions are asked on a terminal only. An existing file is never overwritten. Exit code 1: the file
    exists, or the cluster cannot be asked; 2: an answer is wrong or missing.
    """
    if output.exists():
        raise exit_error(f"{output} exists and is not overwritten: name another with --output")
    values_by_way: dict[Way, object] = {
        "epp": epp or from_cluster,
        "servers": server,
        "prometheus": prometheus,
        "fixed": fixed_limit,
    }
    ways = [way for way, value in values_by_way.items() if value]
    if len(ways) > 1:
        raise exit_error("give one of --epp (or --from-cluster), --server, --prometheus and --fixed-limit", 2)
    # Before the questions: what the cluster answers is not asked.
    if from_cluster:
        pool, namespace, gateway, objective = _find_in_cluster(pool, namespace, gateway, objective)
    answers = Answers(
        gateway,
        pool,
        namespace or "default",
        objective,
        queue_url,
        epp,
        per_endpoint,
        reserve,
        ways[0] if ways else "epp",
        tuple(server or ()),
        prometheus,
        fixed_limit,
    )
    if sys.stdin.isatty() and not json_output:
        answers = _ask_missing(answers, is_way_known=bool(ways), from_cluster=from_cluster)
    if not answers.gateway and len(answers.servers) == 1:
        answers = replace(answers, gateway=answers.servers[0])
    if not answers.gateway:
        raise exit_error("no gateway is named: give --gateway URL", 2)
    # A password does not go into the file: it belongs in the environment.
    has_password = "@" in answers.queue
    answers = replace(answers, pool=answers.pool or "default", queue="" if has_password else answers.queue)
    text = format_config(answers, has_password=has_password)
    from dispatcher.settings.load import parse_settings
    from dispatcher.settings.model import Settings

    parsed = parse_settings(text, {}, name=str(output))
    if not isinstance(parsed, Settings):
        # No file was written, so drop its name and line numbers, and name the options instead of the
        # settings.
        problems = (
            replace(problem, source="", line=None, where=_OPTION_OF_SETTING.get(problem.where, problem.where))
            for problem in parsed
        )
        print_error(*map(str, problems))
        raise typer.Exit(2)
    try:
        # "x" fails if the file has appeared since the first check.
        with output.open("x") as file:
            file.write(text)
    except OSError as error:
        raise exit_error(f"{output}: {error.strerror or error}") from error
    if has_password:
        print_warning(
            "the queue's URL holds a password and is not in the file: export BATCH_DISPATCHER__QUEUE__URL"
        )
    if json_output:
        summary = {"pool": answers.pool, "gateway": answers.gateway, "way": answers.way}
        print_json({"written": str(output), **summary})
    else:
        option = "" if output == Path("config.yaml") else f" --config {output}"
        print_lines(f"{output} is written. Next: batch-dispatcher check{option}")


def _ask_missing(answers: Answers, *, is_way_known: bool, from_cluster: bool) -> Answers:
    """Ask on the terminal for the values that were not given by options, and return all answers."""
    if not is_way_known:
        print_lines(*_WAYS_HELP)
        answers = replace(answers, way=typer.prompt("Which", "epp", value_proc=_parse_way))
    if not from_cluster and not answers.pool:
        what = (
            "Name of the InferencePool"
            if answers.has_inference_pool
            else "Name of the pool (it names the queue)"
        )
        answers = replace(answers, pool=typer.prompt(what, "default"))
    if answers.way == "servers" and not answers.servers:
        what = "URLs of the model servers, with spaces between"
        answers = replace(answers, servers=typer.prompt(what, value_proc=_parse_urls))
    if not answers.gateway and len(answers.servers) != 1:
        what = (
            "inference gateway"
            if answers.has_inference_pool
            else "server, or of the load balancer before them"
        )
        answers = replace(answers, gateway=typer.prompt(f"URL of the {what}", value_proc=_parse_url))
    if from_cluster:
        return answers
    if answers.has_inference_pool and not answers.objective:
        answers = replace(answers, objective=_ask_optional("InferenceObjective with a negative priority"))
    if not answers.queue:
        answers = replace(answers, queue=_ask_optional("redis://… of the queue (none: a Valkey of our own)"))
    match answers.way:
        case "epp" if not answers.epp:
            what = "URL of the endpoint picker's metrics (none: found through the pool)"
            return replace(answers, epp=_ask_optional(what, _parse_url))
        case "servers" if answers.per_endpoint is None:
            what = "Requests that one server runs at once, --max-num-seqs of vLLM (none: searched for)"
            number = _ask_optional(what, _parse_number)
            return replace(answers, per_endpoint=int(number) if number else None)
        case "prometheus" if not answers.prometheus:
            return replace(answers, prometheus=typer.prompt("URL of Prometheus", value_proc=_parse_url))
        case "fixed" if answers.fixed_limit is None:
            return replace(
                answers, fixed_limit=int(typer.prompt("Requests in flight at most", value_proc=_parse_number))
            )
    return answers


def _parse_way(text: str) -> str:
    """Return a source (`Way`). Raises BadParameter, on which typer asks again."""
    if text.strip() not in get_args(Way):
        raise typer.BadParameter(f"it must be one of {', '.join(get_args(Way))}")
    return text.strip()


def _parse_urls(text: str) -> tuple[str, ...]:
    """Return the URLs of an answer. Raises BadParameter, on which typer asks again."""
    if not text.split():
        raise typer.BadParameter("it must be at least one URL")
    return tuple(_parse_url(url) for url in text.split())


def _parse_number(text: str) -> str:
    """Return a number of requests, as text. Raises BadParameter, on which typer asks again."""
    if not text.strip().isdecimal() or not int(text):
        raise typer.BadParameter("it must be a whole number above 0")
    return text.strip()


def _ask_optional(question: str, parse_text: Callable[[str], str] = str.strip) -> str:
    text: str = typer.prompt(
        question, "", show_default=False, value_proc=lambda given: given and parse_text(given)
    )
    return text


def _parse_url(text: str) -> str:
    """Return a URL. Raises BadParameter, on which typer asks again."""
    if not text.strip().startswith(("http://", "https://")):
        raise typer.BadParameter("it must begin with http:// or https://")
    return text.strip()


def _find_in_cluster(pool: str, namespace: str, gateway: str, objective: str) -> tuple[str, str, str, str]:
    from dispatcher.cli.kubectl import KubectlError, list_pools

    try:
        found_pools = [each for each in list_pools(namespace) if pool in ("", each.name)]
    except KubectlError as error:
        raise exit_error(str(error)) from error
    if not found_pools:
        raise exit_error(f"no InferencePool {pool or 'at all'} in {namespace or 'any namespace'}")
    if len(found_pools) > 1:
        names = ", ".join(f"{each.namespace}/{each.name}" for each in found_pools)
        raise exit_error(f"there are several: {names}. Choose by --pool and --namespace", 2)
    found_pool = found_pools[0]
    if not found_pool.gateway and not gateway:
        print_warning(f"no gateway was found whose HTTPRoute leads to {found_pool.name}")
    return (
        found_pool.name,
        found_pool.namespace,
        gateway or found_pool.gateway,
        objective or found_pool.objective,
    )


def format_config(answers: Answers, *, has_password: bool = False) -> str:
    """Return the text of the configuration file."""
    queue = "  # url: is in $BATCH_DISPATCHER__QUEUE__URL, for it holds a password"
    if not has_password:
        queue = f"  url: {_format_scalar(answers.queue)}" if answers.queue else "  # url: redis://redis:6379"
    return f"""\
# The batch dispatcher's configuration. Every setting: docs/reference/configuration.md.
# Check it: batch-dispatcher check. Watch it before you trust it: batch-dispatcher run --observe.

{_format_pool(answers)}
queue:
  # Without a URL: a Valkey of our own beside the dispatcher, for one dispatcher. Passwords belong in
  # the environment: BATCH_DISPATCHER__QUEUE__URL=redis://:secret@redis
{queue}
  # data_dir: ./batch-dispatcher-data    # of that Valkey, relative to this file

{_format_signals(answers)}
{_format_budget(answers)}
# admin:
#   port: 8080    # health, metrics, status and the page, on this machine alone
"""


def _format_pool(answers: Answers) -> str:
    """Return the sections `pool` and `gateway`."""
    if not answers.has_inference_pool:
        return f"""\
pool:
  name: {_format_scalar(answers.pool)}    # it names the queue

gateway:
  url: {_format_scalar(answers.gateway)}    # the model server, or a load balancer before several
"""
    objective = (
        f"objective: {_format_scalar(answers.objective)}" if answers.objective else "# objective: batch"
    )
    return f"""\
pool:
  name: {_format_scalar(answers.pool)}    # your InferencePool; it names the queue, too
  namespace: {_format_scalar(answers.namespace)}

gateway:
  url: {_format_scalar(answers.gateway)}
  # An InferenceObjective with a negative priority: without one batch work competes with everybody.
  {objective}
"""


def _format_signals(answers: Answers) -> str:
    """Return the section `signals`."""
    match answers.way:
        case "servers":
            return f"""\
signals:
  # How full the servers are, by the page of each: vLLM, SGLang (--enable-metrics) or TensorRT-LLM.
  vllm:
    urls: {json.dumps(answers.servers)}    # or service: the DNS name of a headless Service
"""
        case "prometheus":
            return f"""\
signals:
  # How full the pool is, by the endpoint picker's series.
  # Without a picker: docs/explanation/signals.md, own queries.
  source: prometheus
  prometheus:
    url: {_format_scalar(answers.prometheus)}
"""
        case "fixed":
            return """\
signals:
  # Nothing is read. The limit below holds whatever other users send: batch work yields to them only when
  # the server refuses requests (429, or 503 as overloaded).
  source: fixed
"""
    epp = f"urls: [{json.dumps(answers.epp)}]" if answers.epp else '# urls: ["http://127.0.0.1:9090"]'
    return f"""\
signals:
  # How full the pool is. In a cluster leave all of it out: the endpoint picker is found through the pool.
  epp:
    {epp}
  # prometheus:    # stands in while the picker's pages cannot be read
  #   url: http://prometheus:9090
"""


def _format_budget(answers: Answers) -> str:
    """Return the section `budget`."""
    if answers.way == "fixed":
        return f"""\
budget:
  max_in_flight: {answers.fixed_limit}    # requests in flight at most, of all dispatchers together
"""
    limit = answers.per_endpoint
    per_endpoint = f"per_endpoint: {limit}" if limit is not None else "# per_endpoint: 256"
    default = "what the picker shows" if answers.has_inference_pool else "it is searched for"
    return f"""\
budget:
  reserve: {answers.reserve:g}    # share of the capacity that batch work never takes; takes effect at once
  # Requests that one model server runs at once (vLLM: --max-num-seqs). Default: {default}.
  {per_endpoint}
"""


def _format_scalar(text: str) -> str:
    # Unquoted, these words would not be read as text.
    return (
        text
        if _BARE_SCALAR.fullmatch(text) and text.lower() not in ("null", "true", "false")
        else json.dumps(text)
    )
