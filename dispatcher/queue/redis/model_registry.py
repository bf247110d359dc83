"""Calls of the model registry: refresh_warm_markers.lua, warm_up_lock.lua, pin_versions.lua and
label_or_drain.lua."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

import msgspec

from dispatcher.core.printable import plain, shortened
from dispatcher.ports import ModelMarks, PinAsked
from dispatcher.queue.constants import PIN_MOST_S
from dispatcher.queue.model_registry import (
    check_names,
    decided_by,
    fits,
    fitting,
    told_who,
    told_why,
    too_many,
)
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Argument, Reply, in_steps

_LABELS, _DRAINS = 4, 5
"""Numbers of these keys in `queue.keys.MODEL_REGISTRY_KEYS`."""
_KEY_BYTES = 256
"""Length from which on the digest of a key is used for its pin."""
Row = TypeVar("Row", bound=tuple[str, ...])


async def marks(
    backend: Backend,
    owner: str,
    keep: Collection[tuple[str, str]],
    cold: Collection[tuple[str, str]],
    using: Collection[str],
) -> ModelMarks:
    kept, gone = fitting(keep), fitting(cold)
    mine = [_named(owner, model) for model in dict.fromkeys(using) if fits(model)]
    return await _told(
        backend, [_part(owner), len(kept), len(gone), *(_named(*pair) for pair in kept + gone), *mine]
    )


async def look(backend: Backend) -> ModelMarks:
    """Return the model registry. Only reads."""
    return await _told(backend, ["", 0, 0])


async def warm(backend: Backend, what: str, owner: str, model: str, endpoint: str) -> bool:
    """Update the warm-up lock of a model at an endpoint: `take` takes or renews it, `back` releases it, and
    `warm` releases it and marks the model as warm. Return False if another owner has the lock."""
    if not fits(model, endpoint):
        return False
    names = _named(model, endpoint), _part(model, endpoint), _named(model, endpoint, owner)
    return bool((await _run(backend, "warm", [what, *names])).value)


async def pin(backend: Backend, pins: Sequence[PinAsked], most: int) -> list[str]:
    given: list[str] = []
    for some in in_steps(pins, lambda each: len(each.key) + sum(map(len, each.keeps))):
        args: list[Argument] = [most]
        for each in some:
            versions = [version.encode(errors="surrogatepass") for version in (each.version, *each.keeps)]
            args += [_pin_key(each.key), max(0.0, min(each.for_s, PIN_MOST_S)), len(versions), *versions]
        # The script returns the number of the version in the list that it got.
        numbers = (await _run(backend, "pin", args)).value
        given += [(each.version, *each.keeps)[number - 1] for each, number in zip(some, numbers, strict=True)]
    return given


async def label(backend: Backend, family: str, name: str, version: str | None, who: str) -> bool:
    """Set a label, or remove it if `version` is `None`. Return False if there was none to remove."""
    check_names(family=family, label=name, version=family if version is None else version)
    said = b"" if version is None else _named(family, name, version, told_who(who))
    return await _decide(backend, _LABELS, "labels", _part(family, name), said)


async def drain(backend: Backend, model: str, who: str, why: str) -> None:
    check_names(model=model)
    await _decide(backend, _DRAINS, "drains", _part(model), _named(model, told_who(who), told_why(why)))


async def undrain(backend: Backend, model: str) -> bool:
    """Remove the drain of a version. Return False if it was not drained."""
    return fits(model) and await _decide(backend, _DRAINS, "drains", _part(model), b"")


async def _decide(backend: Backend, key: int, what: str, part: bytes, said: bytes) -> bool:
    done = (await _run(backend, "decide", [key, part, said])).value
    if done < 0:  # the registry is full
        raise too_many(what)
    return bool(done)


async def _told(backend: Backend, args: list[Argument]) -> ModelMarks:
    found, used, labels, drains, problems, warming = (await _run(backend, "marks", args)).value
    odd: list[bytes] = []
    said, labelled, drained = {}, {}, {}
    for entry, at in zip(labels[::2], labels[1::2], strict=True):
        for family, name, version, who in _read(tuple[str, str, str, str], [entry], odd):
            said[family, name], labelled[family, name] = version, decided_by(who, "", float(at))
    for entry, at in zip(drains[::2], drains[1::2], strict=True):
        for model, who, why in _read(tuple[str, str, str], [entry], odd):
            drained[model] = decided_by(who, why, float(at))
    return ModelMarks(
        frozenset(_read(tuple[str, str], found, odd)),
        frozenset(model for _, model in _read(tuple[str, str], used, odd)),
        said,
        labelled=labelled,
        drained=drained,
        warming=frozenset(_read(tuple[str, str, str], warming, odd)),
        problem=_problem(problems, odd),
    )


def _read(kind: type[Row], entries: Iterable[bytes], odd: list[bytes]) -> Iterator[Row]:
    """Yield the entries that have the expected form. Others are collected in `unreadable` and ignored."""
    for entry in entries:
        try:
            yield msgspec.json.decode(entry, type=kind)
        except ValueError:  # of msgspec, and what is no UTF-8
            odd.append(entry)


def _problem(foreign: Sequence[bytes], odd: Sequence[bytes]) -> str:
    told = [each.decode(errors="replace") for each in foreign]
    if odd:
        first = shortened(plain(odd[0].decode(errors="replace")), 60)
        told.append(f"of what is said of versions of models {len(odd)} cannot be read, the first: {first}")
    return "; ".join(told)


async def _run(backend: Backend, script: str, args: Sequence[Argument]) -> Reply:
    size = sum(len(each) for each in args if isinstance(each, str | bytes))
    return await backend.scripts.run(script, backend.names.board, args, size=size)


def _named(*names: str) -> bytes:
    """Encode names as they are in the keys. A lone surrogate, which may be part of the name of an owner or a
    person, is replaced."""
    return msgspec.json.encode([name.encode(errors="replace").decode() for name in names])


def _part(*names: str) -> bytes:
    """Return how all entries begin that have these names first, and more after them."""
    return _named(*names)[:-1] + b","


def _pin_key(key: str) -> bytes:
    """Return the field of a pin. The empty field is used for all pins (pin_versions.lua), so an empty key is
    hashed."""
    text = key.encode(errors="surrogatepass")
    return text if 0 < len(text) <= _KEY_BYTES else f"sha256:{sha256(text).hexdigest()}".encode()
