"""Calls of the model registry: refresh_warm_markers.lua, warm_up_lock.lua, pin_versions.lua and
label_or_drain.lua."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

import msgspec

from dispatcher.core.printable import escape_unprintable, truncate_text
from dispatcher.ports import ModelRegistryState, PinRequest
from dispatcher.queue.constants import MAX_PIN_S
from dispatcher.queue.model_registry import (
    are_valid_names,
    check_names,
    clean_who,
    clean_why,
    describe_decision,
    filter_valid_pairs,
    make_limit_error,
)
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Argument, Reply, split_batches

_LABELS_KEY, _DRAINS_KEY = 4, 5
"""Numbers of these keys in `queue.keys.MODEL_REGISTRY_KEYS`."""
_MAX_PIN_KEY_BYTES = 256
"""Length from which on the digest of a key is used for its pin."""
Row = TypeVar("Row", bound=tuple[str, ...])


async def refresh_warm_markers(
    backend: Backend,
    owner: str,
    keep: Collection[tuple[str, str]],
    remove: Collection[tuple[str, str]],
    models_in_use: Collection[str],
) -> ModelRegistryState:
    kept, removed = filter_valid_pairs(keep), filter_valid_pairs(remove)
    in_use = [_encode_names(owner, model) for model in dict.fromkeys(models_in_use) if are_valid_names(model)]
    return await _run_refresh(
        backend,
        [
            _encode_prefix(owner),
            len(kept),
            len(removed),
            *(_encode_names(*pair) for pair in kept + removed),
            *in_use,
        ],
    )


async def read_model_registry(backend: Backend) -> ModelRegistryState:
    """Return the model registry. Only reads."""
    return await _run_refresh(backend, ["", 0, 0])


async def update_warm_up_lock(backend: Backend, action: str, owner: str, model: str, endpoint: str) -> bool:
    """Update the warm-up lock of a model at an endpoint: `take` takes or renews it, `back` releases it, and
    `warm` releases it and marks the model as warm. Return False if another owner has the lock."""
    if not are_valid_names(model, endpoint):
        return False
    names = (
        _encode_names(model, endpoint),
        _encode_prefix(model, endpoint),
        _encode_names(model, endpoint, owner),
    )
    return bool((await _run_registry_script(backend, "warm_up_lock", [action, *names])).value)


async def pin_versions(backend: Backend, pins: Sequence[PinRequest], max_pins: int) -> list[str]:
    given: list[str] = []
    for batch in split_batches(pins, lambda each: len(each.key) + sum(map(len, each.allowed_versions))):
        args: list[Argument] = [max_pins]
        for each in batch:
            versions = [
                version.encode(errors="surrogatepass")
                for version in (each.proposed_version, *each.allowed_versions)
            ]
            args += [
                _encode_pin_field(each.key),
                max(0.0, min(each.keep_s, MAX_PIN_S)),
                len(versions),
                *versions,
            ]
        # The script returns the number of the version in the list that it got.
        numbers = (await _run_registry_script(backend, "pin_versions", args)).value
        given += [
            (each.proposed_version, *each.allowed_versions)[number - 1]
            for each, number in zip(batch, numbers, strict=True)
        ]
    return given


async def set_label(backend: Backend, family: str, name: str, version: str | None, who: str) -> bool:
    """Set a label, or remove it if `version` is `None`. Return False if there was none to remove."""
    check_names(family=family, label=name, version=family if version is None else version)
    note = b"" if version is None else _encode_names(family, name, version, clean_who(who))
    return await _label_or_drain(backend, _LABELS_KEY, "labels", _encode_prefix(family, name), note)


async def drain_version(backend: Backend, model: str, who: str, why: str) -> None:
    check_names(model=model)
    await _label_or_drain(
        backend,
        _DRAINS_KEY,
        "drains",
        _encode_prefix(model),
        _encode_names(model, clean_who(who), clean_why(why)),
    )


async def undrain_version(backend: Backend, model: str) -> bool:
    """Remove the drain of a version. Return False if it was not drained."""
    return are_valid_names(model) and await _label_or_drain(
        backend, _DRAINS_KEY, "drains", _encode_prefix(model), b""
    )


async def _label_or_drain(backend: Backend, key_number: int, what: str, prefix: bytes, note: bytes) -> bool:
    done = (await _run_registry_script(backend, "label_or_drain", [key_number, prefix, note])).value
    if done < 0:  # the registry is full
        raise make_limit_error(what)
    return bool(done)


async def _run_refresh(backend: Backend, args: list[Argument]) -> ModelRegistryState:
    found, used, labels, drains, problems, warming = (
        await _run_registry_script(backend, "refresh_warm_markers", args)
    ).value
    unreadable: list[bytes] = []
    versions, label_origins, drained = {}, {}, {}
    for entry, at in zip(labels[::2], labels[1::2], strict=True):
        for family, name, version, who in _decode_rows(tuple[str, str, str, str], [entry], unreadable):
            versions[family, name], label_origins[family, name] = (
                version,
                describe_decision(who, "", float(at)),
            )
    for entry, at in zip(drains[::2], drains[1::2], strict=True):
        for model, who, why in _decode_rows(tuple[str, str, str], [entry], unreadable):
            drained[model] = describe_decision(who, why, float(at))
    return ModelRegistryState(
        frozenset(_decode_rows(tuple[str, str], found, unreadable)),
        frozenset(model for _, model in _decode_rows(tuple[str, str], used, unreadable)),
        versions,
        label_origins=label_origins,
        drained_models=drained,
        warm_up_locks=frozenset(_decode_rows(tuple[str, str, str], warming, unreadable)),
        problem=_describe_problem(problems, unreadable),
    )


def _decode_rows(kind: type[Row], entries: Iterable[bytes], unreadable: list[bytes]) -> Iterator[Row]:
    """Yield the entries that have the expected form. Others are collected in `unreadable` and ignored."""
    for entry in entries:
        try:
            yield msgspec.json.decode(entry, type=kind)
        except ValueError:  # of msgspec, and what is no UTF-8
            unreadable.append(entry)


def _describe_problem(foreign: Sequence[bytes], unreadable: Sequence[bytes]) -> str:
    descriptions = [each.decode(errors="replace") for each in foreign]
    if unreadable:
        first = truncate_text(escape_unprintable(unreadable[0].decode(errors="replace")), 60)
        descriptions.append(
            f"{len(unreadable)} entries of the model registry cannot be read, the first: {first}"
        )
    return "; ".join(descriptions)


async def _run_registry_script(backend: Backend, script: str, args: Sequence[Argument]) -> Reply:
    size = sum(len(each) for each in args if isinstance(each, str | bytes))
    return await backend.scripts.run(script, backend.names.model_registry_keys, args, size_bytes=size)


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
