"""Settings of the queue."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.requests.cluster_slot import explain_brace_fault
from dispatcher.settings.section import Section
from dispatcher.settings.values import Key, SecretUrl, Text, setting_error, url_validator

QueueUrl = Annotated[
    SecretUrl,
    url_validator(
        "redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", hosts=64
    ),
]
DEFAULT_OWNER_TIMEOUT_S = 5.0


class QueueSettings(Section):
    """The queue in Redis or Valkey."""

    url: QueueUrl = Field(
        SecretUrl(""),
        description="URL of Redis: `redis://`, `rediss://` (TLS), `redis+sentinel://` or `redis+cluster://`, "
        "with several hosts separated by commas. If empty, a Valkey server is started beside this process, "
        "with its data in `data_dir`. Set a password through the environment, not in a ConfigMap.",
    )
    data_dir: Text = Field(
        "./batch-dispatcher-data",
        description="Data directory of the embedded Valkey, relative to the configuration file.",
    )
    fsync: Literal["everysec", "always"] = Field(
        "always",
        description="When the embedded Valkey flushes its file to the disk. With `always`, nothing that was "
        "acknowledged is lost, at a cost of about a millisecond per step (docs/how-to/operations.md). With "
        "`everysec`, a crash of the machine, or a kill of Valkey alone while the disk is slow, loses the "
        "last one or two seconds: accepted requests are lost without notice, and delivered results may come "
        "again.",
    )
    name: Key = Field(
        "",
        description="Key of the queue. If empty, `batch:{<pool>}:requests`. The braces keep all keys of the "
        "queue in one Redis Cluster slot. A name needs one `{tag}`, or no braces: then its other keys have "
        "the whole name in braces.",
    )
    results: Key = Field(
        "",
        description="Result list of requests that do not name one. If empty, `batch:{<pool>}:results`.",
    )
    result_lists: Annotated[tuple[Key, ...] | None, Field(strict=False)] = Field(
        None,
        description="Patterns of the result lists that a request may name, beside `results`; `*` matches any "
        "characters. A request that names another list, or a key of a queue, fails with INVALID_REQUEST and "
        "is not sent. If null, `batch-results:*`, `<results>:*`, and names with the `{tag}` of the queue.",
    )
    lease_s: float = Field(
        30.0,
        ge=1,
        le=86_400,
        description="Seconds after which a lease that was not renewed is taken back from its dispatcher. "
        "Leases are renewed after a third of this time. With only a few seconds, a short pause of Redis "
        "makes requests run twice.",
    )
    owner_timeout_s: float | None = Field(
        None,
        ge=1,
        le=86_400,
        description="Seconds without a heartbeat after which a dispatcher is considered dead, and its "
        "requests run again. Not above `lease_s`. If null, 5, or `lease_s` if that is less.",
    )
    poll_s: float = Field(
        0.2,
        ge=0.01,
        le=60,
        description="Seconds between polls of the queue, for producers that do not wake the dispatcher.",
    )
    max_payload_bytes: int = Field(
        16_777_216,
        ge=1,
        description="Largest payload of a request, in bytes. A request with a longer payload, or with more "
        "than 64 KiB beside its payload, fails with TOO_LARGE. A request that is longer than both limits "
        "together is not even transferred to a dispatcher.",
    )
    result_ttl_s: float = Field(
        604_800.0,
        ge=0,
        description="Seconds for which a result list is kept after its last push. With 0, it is kept for "
        "ever.",
    )
    dead_max: int = Field(
        100_000,
        ge=1,
        description="Largest number of requests in the dead-letter set. Above it, the oldest are deleted, "
        "which is counted and logged.",
    )
    max_pending: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Largest number of waiting requests. More requests from the Python client, from "
        "`submit`, or from any other program that runs the queue's submit script are rejected until fewer "
        "wait. The limit does not apply to programs that call ZADD themselves. With 0, there is no limit.",
    )

    @field_validator("owner_timeout_s")
    @classmethod
    def _check_owner_timeout(cls, timeout_s: float | None, info: ValidationInfo) -> float | None:
        if timeout_s is not None and timeout_s > info.data.get("lease_s", timeout_s):
            raise setting_error(f"must not be above queue.lease_s ({info.data['lease_s']:g})")
        return timeout_s

    @field_validator("name")
    @classmethod
    def _check_one_slot(cls, name: str) -> str:
        if (why := explain_brace_fault(name)) is not None:
            raise setting_error(why)
        return name

    @field_validator("results")
    @classmethod
    def _check_results_list(cls, results: str, info: ValidationInfo) -> str:
        if results and results == info.data.get("name"):
            raise setting_error("must not be queue.name: results would be taken for requests")
        return results

    def effective_owner_timeout_s(self) -> float:
        """Return the seconds without a heartbeat after which a dispatcher is considered dead."""
        return (
            min(DEFAULT_OWNER_TIMEOUT_S, self.lease_s)
            if self.owner_timeout_s is None
            else self.owner_timeout_s
        )


def with_derived_names(queue: QueueSettings, pool: str) -> QueueSettings:
    """Return the settings with the default names of queue and result list for a pool."""
    # `model_construct` keeps the set of given fields, so that the derived names still count as defaults.
    values = {
        **dict(queue),
        "name": queue.name or f"batch:{{{pool}}}:requests",
        "results": queue.results or f"batch:{{{pool}}}:results",
    }
    return QueueSettings.model_construct(_fields_set=queue.model_fields_set, **values)
