"""The settings of the queue."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.core.requests.cluster_slot import fault_of_braces
from dispatcher.settings.section import Section
from dispatcher.settings.values import Key, SecretUrl, Text, refuse, url

QueueUrl = Annotated[
    SecretUrl,
    url("redis", "rediss", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster", hosts=64),
]
OWNER_TIMEOUT_S = 5.0


class QueueSettings(Section):
    """The queue in Redis or Valkey."""

    url: QueueUrl = Field(
        SecretUrl(""),
        description="`redis://`, `rediss://` (TLS), `redis+sentinel://`, `redis+cluster://`; several hosts "
        "with commas. Empty: a Valkey server started beside this process, with its data in "
        "`data_dir`. Give a password through the environment, not in a ConfigMap.",
    )
    data_dir: Text = Field(
        "./batch-dispatcher-data",
        description="Directory of the embedded Valkey's data; relative to the file.",
    )
    fsync: Literal["everysec", "always"] = Field(
        "always",
        description="When the embedded Valkey's file is forced to the disk. With `always` nothing that was "
        "acknowledged is lost, at about a millisecond a step (docs/operations.md). With `everysec` a crash "
        "of the machine, or a kill of Valkey alone while the disk is slow, loses the last second or two: "
        "accepted requests are gone without a word, results that were told may come again.",
    )
    name: Key = Field(
        "",
        description="Key of the queue. Empty: `batch:{<pool>}:requests`; the braces keep all its keys in one "
        "Redis Cluster slot. A name without braces is wrapped whole; stray braces are refused.",
    )
    results: Key = Field(
        "", description="Result list of a request that names none. Empty: `batch:{<pool>}:results`."
    )
    result_lists: Annotated[tuple[Key, ...] | None, Field(strict=False)] = Field(
        None,
        description="Patterns of the lists that a request may name for its result, beside `results`; `*` "
        "stands for any characters. Others end as INVALID_REQUEST, unsent, and so do keys of any queue. "
        "null: `batch-results:*`, `<results>:*`, and names with the queue's own `{tag}`.",
    )
    lease_s: float = Field(
        30.0,
        ge=1,
        le=86_400,
        description="Seconds after which a lease that was not renewed is taken back, whoever holds it; it is "
        "renewed every third of it. Below some seconds a short pause of Redis makes requests run twice.",
    )
    owner_timeout_s: float | None = Field(
        None,
        ge=1,
        le=86_400,
        description="Seconds of silence after which a dispatcher is taken for dead, and its requests run "
        "again. Not above `lease_s`. null: 5, or `lease_s` where that is less.",
    )
    poll_s: float = Field(
        0.2,
        ge=0.01,
        le=60,
        description="Seconds between looks at the queue, for producers that do not wake us.",
    )
    max_payload_bytes: int = Field(
        16_777_216,
        ge=1,
        description="A longer payload ends as TOO_LARGE, and so does a request with more than 64 KiB beside "
        "its payload. What is longer than both together is not even moved.",
    )
    result_ttl_s: float = Field(
        604_800.0, ge=0, description="Seconds a result list lives after its last push. 0: for ever."
    )
    dead_max: int = Field(
        100_000, ge=1, description="Dead requests that are kept; the oldest go first, counted and logged."
    )
    max_pending: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Requests that may wait in the queue when our client, `submit` or any other program that "
        "runs the queue's submit script adds more; they are refused until fewer wait. A program that calls "
        "ZADD itself is not held to it. 0: no limit.",
    )

    @field_validator("owner_timeout_s")
    @classmethod
    def _within_a_lease(cls, timeout_s: float | None, info: ValidationInfo) -> float | None:
        if timeout_s is not None and timeout_s > info.data.get("lease_s", timeout_s):
            raise refuse(f"must not be above queue.lease_s ({info.data['lease_s']:g})")
        return timeout_s

    @field_validator("name")
    @classmethod
    def _one_slot(cls, name: str) -> str:
        if (why := fault_of_braces(name)) is not None:
            raise refuse(why)
        return name

    @field_validator("results")
    @classmethod
    def _another_list(cls, results: str, info: ValidationInfo) -> str:
        if results and results == info.data.get("name"):
            raise refuse("must not be queue.name: results would be taken for requests")
        return results

    def timeout_s(self) -> float:
        """Seconds of silence after which a dispatcher is taken for dead."""
        return min(OWNER_TIMEOUT_S, self.lease_s) if self.owner_timeout_s is None else self.owner_timeout_s


def named(queue: QueueSettings, pool: str) -> QueueSettings:
    """Return the settings with the names that derive from the pool's, which are not marked as set by the
    operator."""
    values = {
        **dict(queue),
        "name": queue.name or f"batch:{{{pool}}}:requests",
        "results": queue.results or f"batch:{{{pool}}}:results",
    }
    return QueueSettings.model_construct(_fields_set=queue.model_fields_set, **values)
