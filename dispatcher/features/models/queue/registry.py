"""Calls of the model registry: refresh_warm_markers.lua, warm_up_lock.lua, pin_versions.lua and
label_or_drain.lua."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

import msgspec

from dispatcher.common.printable import escape_unprintable, truncate_text
from dispatcher.features.models.queue.registry_rules import (
    MAX_PIN_S,
    MAX_PINS,
    are_valid_names,
    check_names,
    clean_who,
    clean_why,
    describe_decision,
    make_limit_error,
)
from dispatcher.features.models.registry import ModelRegistryState, PinRequest
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import split_batches
from dispatcher.queue.redis.steps.common import split_rows

_MAX_PIN_KEY_BYTES = 256
"""Length from which on the digest of a key is used for its pin."""
Row = TypeVar("Row", bound=tuple[str, ...])


async def refresh_registry(
    backend: Backend,
    owner: str = "",
    keep: Collection[tuple[str, str]] = (),
    remove: Collection[tuple[str, str]] = (),
    models_in_use: Collection[str] = (),
) -> ModelRegistryState:
    """Report what is warm and in use at an owner, and return the model registry. Without an owner, only
    read."""
    kept, removed = ([_encode_names(*pair) for pair in pairs] for pairs in (keep, remove))
    in_use = [_encode_names(owner, model) for model in dict.fromkeys(models_in_use) if are_valid_names(model)]
    prefix = _encode_prefix(owner) if owner else b""
    reply = await backend.run_script(
        "refresh_warm_markers",
        {"owner_prefix": prefix, "kept": kept, "removed": removed, "in_use": in_use},
        size_bytes=sum(map(len, (*kept, *removed, *in_use))),
    )
    # JSON lists of names, and the time (Unix seconds) when an operator set each label and drain.
    warm_markers, used, labels, drains, problems, warm_up_locks = reply.value
    unreadable: list[bytes] = []
    versions, label_origins, drained = {}, {}, {}
    for entry, at in split_rows(labels, 2):
        for family, name, version, who in _decode_rows(tuple[str, str, str, str], [entry], unreadable):
            versions[family, name] = version
            label_origins[family, name] = describe_decision(who, "", float(at))
    for entry, at in split_rows(drains, 2):
        for model, who, why in _decode_rows(tuple[str, str, str], [entry], unreadable):
            drained[model] = describe_decision(who, why, float(at))
    return ModelRegistryState(
        frozenset(_decode_rows(tuple[str, str], warm_markers, unreadable)),
        frozenset(model for _, model in _decode_rows(tuple[str, str], used, unreadable)),
        versions,
        label_origins=label_origins,
        drained_models=drained,
        warm_up_locks=frozenset(_decode_rows(tuple[str, str, str], warm_up_locks, unreadable)),
        problem=_describe_problem([each.decode(errors="replace") for each in problems], unreadable),
    )


async def update_warm_up_lock(backend: Backend, action: str, owner: str, model: str, endpoint: str) -> bool:
    """Update the warm-up lock of a model at an endpoint: `take` takes or renews it, `back` releases it, and
    `warm` releases it and marks the model as warm. Return False if another owner has the lock."""
    if not are_valid_names(model, endpoint):
        return False
    reply = await backend.run_script(
        "warm_up_lock",
        {
            "action": action,
            "warm_name": _encode_names(model, endpoint),
            "prefix": _encode_prefix(model, endpoint),
            "own_name": _encode_names(model, endpoint, owner),
        },
    )
    return bool(reply.value)


async def pin_versions(backend: Backend, pins: Sequence[PinRequest], max_pins: int = MAX_PINS) -> list[str]:
    given: list[str] = []
    for batch in split_batches(pins, lambda each: len(each.key) + sum(map(len, each.allowed_versions))):
        rows = [
            {
                "key": _encode_pin_field(each.key),
                "keep_s": max(0.0, min(each.keep_s, MAX_PIN_S)),
                "version_count": 1 + len(each.allowed_versions),
            }
            for each in batch
        ]
        versions = [
            version.encode(errors="surrogatepass")
            for each in batch
            for version in (each.proposed_version, *each.allowed_versions)
        ]
        reply = await backend.run_script(
            "pin_versions",
            {"max_pins": max_pins, "pins": rows, "versions": versions},
            size_bytes=sum(map(len, versions)),
        )
        # The script returns the number of the version in the list that it got.
        numbers = reply.value
        given += [
            (each.proposed_version, *each.allowed_versions)[number - 1]
            for each, number in zip(batch, numbers, strict=True)
        ]
    return given


async def set_label(backend: Backend, family: str, name: str, version: str | None, who: str) -> bool:
    check_names(family=family, label=name, version=family if version is None else version)
    note = b"" if version is None else _encode_names(family, name, version, clean_who(who))
    return await _label_or_drain(backend, "labels", _encode_prefix(family, name), note)


async def drain_version(backend: Backend, model: str, who: str, why: str) -> None:
    check_names(model=model)
    await _label_or_drain(
        backend,
        "drains",
        _encode_prefix(model),
        _encode_names(model, clean_who(who), clean_why(why)),
    )


async def undrain_version(backend: Backend, model: str) -> bool:
    return are_valid_names(model) and await _label_or_drain(backend, "drains", _encode_prefix(model), b"")


async def _label_or_drain(backend: Backend, kind: str, prefix: bytes, name: bytes) -> bool:
    done = (await backend.run_script("label_or_drain", {"kind": kind, "prefix": prefix, "name": name})).value
    if done < 0:  # the registry is full
        raise make_limit_error(kind)
    return bool(done)


def _decode_rows(kind: type[Row], entries: Iterable[bytes], unreadable: list[bytes]) -> Iterator[Row]:
    """Yield the entries that have the expected form. Others are collected in `unreadable` and ignored."""
    for entry in entries:
        try:
            yield msgspec.json.decode(entry, type=kind)
        except ValueError:  # of msgspec, and what is no UTF-8
            unreadable.append(entry)


def _describe_problem(problems: Sequence[str], unreadable: Sequence[bytes]) -> str:
    descriptions = list(problems)
    if unreadable:
        first = truncate_text(escape_unprintable(unreadable[0].decode(errors="replace")), 60)
        descriptions.append(
            f"{len(unreadable)} entries of the model registry cannot be read, the first: {first}"
        )
    return "; ".join(descriptions)


def _encode_names(*names: str) -> bytes:
    """Encode names as they are in the keys. A lone surrogate, which may be part of the name of an owner or a
    person, is replaced."""
    return msgspec.json.encode([name.encode(errors="replace").decode() for name in names])


def _encode_prefix(*names: str) -> bytes:
    """Return how all entries begin that have these names first, and more after them."""
    return _encode_names(*names)[:-1] + b","


def _encode_pin_field(key: str) -> bytes:
    """Return the field of a pin. The empty field is used for all pins (pin_versions.lua), so an empty key is
    hashed."""
    text = key.encode(errors="surrogatepass")
    return text if 0 < len(text) <= _MAX_PIN_KEY_BYTES else f"sha256:{sha256(text).hexdigest()}".encode()
