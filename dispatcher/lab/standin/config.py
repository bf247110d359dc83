"""Configuration of the live world, and the changes that it takes while it runs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.lab.standin.made_up_traffic import TRACE_MAKERS
from dispatcher.lab.standin.replies import Answer

Engine = Literal["vllm", "sglang"]


class Config(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Initial configuration of a world. If the default is empty, the last element of the annotation says what
    applies."""

    host: Annotated[str, Meta(description="Where the three listeners are.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="Of the gateway; 0: any.")] = 0
    metrics_port: Annotated[int, Meta(description="Of the picker's /metrics; 0: any.")] = 0
    control_port: Annotated[int, Meta(description="Of the control side; 0: any.")] = 0
    pool: Annotated[str, Meta(description="The pool's name on the picker's page.")] = "qwen"
    slots: Annotated[int, Meta(description="Requests that all endpoints together really run at once.")] = 32
    endpoints: Annotated[int, Meta(description="Model servers that the picker knows.")] = 1
    declared: Annotated[
        int | None,
        Meta(description="Requests that the picker believes they run (maxConcurrency × endpoints)."),
        "the truth",
    ] = None
    queue_limit: Annotated[
        int | None, Meta(description="Requests that may wait; one more is answered 429."), "any number"
    ] = None
    seconds: Annotated[
        float | None,
        Meta(description="How long every request runs."),
        "by its tokens and the pool's fullness",
    ] = None
    path_s: Annotated[
        float, Meta(description="What the way to the pool takes, and again the way back, in seconds.")
    ] = 0.0
    flow_control: Annotated[bool, Meta(description="Requests wait in the picker, and it says how many.")] = (
        True
    )
    detector: Annotated[
        Literal["concurrency", "utilization"],
        Meta(description="The kind of the picker's saturation detector."),
    ] = "concurrency"
    detector_name: Annotated[
        str, Meta(description="What the picker's operator calls the detector."), "as the kind"
    ] = ""
    in_flight_load: Annotated[
        bool,
        Meta(description="The picker has an in-flight-load producer: its page has requests by priority."),
    ] = False
    cold: Annotated[
        bool,
        Meta(description="The picker has just started: nothing known before its first flush."),
    ] = False
    kv_at_full: Annotated[
        float, Meta(description="Share of the KV cache in use while all slots are taken.")
    ] = 0.6
    prefix_blocks: Annotated[
        int, Meta(description="Blocks of prompts (64 bytes each) that the model servers keep; 0: none.")
    ] = 0
    prefix_servers: Annotated[
        int, Meta(description="Model servers that keep prompts, each its own; sessions stay at one.")
    ] = 1
    models: Annotated[
        str,
        Meta(
            description="What the servers list, as a,b;a: the first two models, all others one. Any other "
            "name is answered 404."
        ),
        "one model m, and any name is served",
    ] = ""
    cold_s: Annotated[
        float,
        Meta(description="So much longer the first request to a model takes on each server, in seconds."),
    ] = 0.0
    generation: Annotated[
        GenerationConfig | None,
        Meta(
            description="The servers generate text that depends on all text before it. A JSON object with "
            "the fields of GenerationConfig, {} for its defaults."
        ),
        "every answer is the text ok",
    ] = None
    subset_header: Annotated[
        str,
        Meta(
            description="By this header a request says to which model servers alone it may go: as "
            "host:port/servers/N, or as host:port where they are apart. Where none of them is there: 503."
        ),
        "no header says so",
    ] = ""
    apart: Annotated[
        bool,
        Meta(
            description="Each model server has an address of its own, too (`servers` in the line of JSON), "
            "which refuses connections while it is gone."
        ),
    ] = False
    engine: Annotated[Engine, Meta(description="As which kind of server each model server shows itself.")] = (
        "vllm"
    )
    lag_s: Annotated[float, Meta(description="The page tells the state of so many seconds ago.")] = 0.0
    metrics_refresh_s: Annotated[
        float,
        Meta(description="The picker reads the metrics of the model servers every so many seconds."),
    ] = 0.5
    scorer_scrape_s: Annotated[
        float,
        Meta(
            description="The picker sends each request to the model server that was least loaded when it "
            "scraped them last, every so many seconds (0.05 in the real one); 0: a request waits only while "
            "no server has a free slot."
        ),
    ] = 0.0
    flush_s: Annotated[float, Meta(description="Seconds between two rewrites of the averages.")] = 5.0
    metrics_token: Annotated[
        str, Meta(description="The bearer token that /metrics asks for."), "none is asked for"
    ] = ""
    trace: Annotated[
        str,
        Meta(
            description="Realtime traffic: a CSV of time, context tokens, generated tokens; or the name of "
            f"traffic that is made up: {', '.join(TRACE_MAKERS)}."
        ),
        "no traffic",
    ] = ""
    trace_from_s: Annotated[float, Meta(description="Where in the trace to begin, in seconds.")] = 0.0
    trace_speed: Annotated[float, Meta(description="So many seconds of the trace pass in one.")] = 1.0
    steps: Annotated[
        str,
        Meta(
            description="Realtime traffic: so many held in the pool from then on, as 0:0,10:20,30:0 "
            "(seconds:level)."
        ),
        "no traffic",
    ] = ""
    realtime_seconds: Annotated[
        float | None,
        Meta(description="How long a realtime request runs."),
        "by its tokens and the pool's fullness",
    ] = None
    tls_cert: Annotated[str, Meta(description="PEM file; with it the gateway speaks TLS."), "plain HTTP"] = ""
    tls_key: Annotated[str, Meta(description="PEM file of its key."), "in the same file"] = ""
    seed: Annotated[int, Meta(description="Of all that is drawn.")] = 0
    log_max: Annotated[int, Meta(description="The newest so many requests are kept in the log.")] = 200_000


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fault of the gateway: in its answers, or of its listener."""

    listener: Literal["", "refuse", "blackhole", "plaintext"] = ""
    """Fault of the listener. `refuse`: stop listening and drop all connections. `blackhole`: connections
    neither open nor answer. `plaintext`: stop speaking TLS."""
    answer: Answer | None = None
    match: str = ""
    """Text in the body or in the fairness header of the requests that are affected. Empty for all
    requests."""
    share: float = 1.0
    """Share of the requests that are affected (seeded)."""
    times: int | None = None
    """Number of requests that are affected, or `None` for any number."""


class Roll(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Replacement of the servers one by one, the first at once. Requests that run on a server run to their
    end."""

    to: list[str]
    """Models that each server serves afterwards."""
    gone_s: float = 1.0
    """Time for which a server is gone: it answers nothing, and its slots are missing."""
    pause_s: float = 0.0
    """Time from the return of a server until the next one goes."""


class Adapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """LoRA adapter that is loaded while the servers run."""

    name: str
    after_s: float = 0.0
    """Time until loading starts."""
    takes_s: float = 0.0
    """Time that loading takes. The page of the server lists the adapter as waiting meanwhile."""
    servers: list[int] | None = None
    """Numbers of the servers, or `None` for all."""


class Control(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Changes of a running world. Absent fields stay unchanged."""

    gateway: Fault | msgspec.UnsetType | None = msgspec.UNSET
    """Fault of the gateway. null removes it."""
    metrics: (
        Literal["ok", "gone", "hang", "garbage", "frozen", "empty", "error", "unauthorized"]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    slots: int | msgspec.UnsetType = msgspec.UNSET
    """Real capacity. The capacity that the picker assumes stays."""
    declared: int | msgspec.UnsetType = msgspec.UNSET
    endpoints: int | msgspec.UnsetType = msgspec.UNSET
    """Number of model servers. With 0 nothing runs, the gateway answers 503, and the averages freeze."""
    queue_limit: int | msgspec.UnsetType | None = msgspec.UNSET
    seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    path_s: float | msgspec.UnsetType = msgspec.UNSET
    lag_s: float | msgspec.UnsetType = msgspec.UNSET
    flush: bool = False
    """Renew the averages of the picker now, also if it started cold."""
    realtime: int | msgspec.UnsetType = msgspec.UNSET
    """Number of realtime requests to keep in the pool from now on."""
    models: list[list[str]] | msgspec.UnsetType | None = msgspec.UNSET
    """Models that each server lists; the last entry is for all further servers. null: any name is served."""
    roll: Roll | msgspec.UnsetType = msgspec.UNSET
    adapter: Adapter | msgspec.UnsetType = msgspec.UNSET
    cold_s: float | msgspec.UnsetType = msgspec.UNSET
    subset_header: str | msgspec.UnsetType = msgspec.UNSET
    """Header in which a request lists the servers that it may go to. Empty to ignore such headers."""
    lists: Literal["ok", "hang", "error", "garbage", "unauthorized"] | msgspec.UnsetType = msgspec.UNSET
    """Answer of each server to requests for its list of models."""
    generation: GenerationConfig | msgspec.UnsetType | None = msgspec.UNSET
    """Behaviour of servers that generate text, for requests that arrive from now on. null: every answer has
    the same text."""
    evict: str = ""
    """Id of a request that the picker stops for more important ones: its answer is a 429, or is cut if it has
    begun."""
    kill_server: str = ""
    """Session token of a model server that ends. Answers that it generates are cut."""
    restart: bool = False
    """Start a new measurement of peaks, means, counts and quantiles. The log and the counts by request id
    stay."""


CHANGED_IN_CONFIG = (
    *("slots", "queue_limit", "seconds", "path_s", "lag_s", "cold_s", "subset_header", "generation"),
)
"""Fields of `Control` that replace the field of `Config` with the same name."""
