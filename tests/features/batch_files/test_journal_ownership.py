"""The file of a journal has one owner at any moment, even while another process removes the file.

The tests act at exact moments through audit hooks, which Python calls between two steps of the tested code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dispatcher.features.batch_files.database import JournalError
from dispatcher.features.batch_files.journal import FileJournal

_hooks: dict[str, Callable[[tuple[Any, ...]], None]] = {}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _hooks:
        _hooks.pop(event)(arguments)


sys.addaudithook(_audit)


@contextmanager
def run_at_audit_event(event: str, action: Callable[[tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `action` at the next audit event of this name."""
    _hooks[event] = action
    try:
        yield
        assert event not in _hooks, "the event occurred"
    finally:
        _hooks.pop(event, None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl.journal"


def test_journal_cannot_be_opened_while_it_is_removed(path: Path) -> None:
    errors: list[JournalError] = []

    def open_another(_: tuple[Any, ...]) -> None:
        with pytest.raises(JournalError, match="in use") as raised:
            FileJournal(path)
        errors.append(raised.value)

    journal = FileJournal(path)
    with run_at_audit_event("os.remove", open_another):
        journal.close()
    assert len(errors) == 1
    assert list(path.parent.iterdir()) == []


def test_removed_and_recreated_journal_is_not_used(path: Path) -> None:
    """After a journal has opened the file, the owner removes it and a third journal creates a new one."""
    first = FileJournal(path)
    others: list[FileJournal] = []

    def replace(_: tuple[Any, ...]) -> None:
        first.close()
        others.append(FileJournal(path))

    with run_at_audit_event("sqlite3.connect/handle", replace), pytest.raises(JournalError, match="in use"):
        FileJournal(path)
    others[0].facts.checked = True
    with others[0].transaction():
        others[0].facts.job = "others"
    others[0].close()
    assert FileJournal(path).facts.job == "others"


def test_removed_journal_is_created_again(path: Path) -> None:
    first = FileJournal(path)
    with run_at_audit_event("sqlite3.connect/handle", lambda _: first.close()):
        journal = FileJournal(path)
    journal.facts.checked = True
    with journal.transaction():
        journal.facts.job = "mine"
    journal.close()
    assert FileJournal(path).facts.job == "mine"


def test_journal_that_is_replaced_repeatedly_is_an_error(path: Path) -> None:
    def replace(_: tuple[Any, ...]) -> None:
        path.unlink()
        path.touch()
        _hooks["sqlite3.connect/handle"] = replace

    _hooks["sqlite3.connect/handle"] = replace
    try:
        with pytest.raises(JournalError, match="other processes open and remove it"):
            FileJournal(path)
    finally:
        _hooks.clear()
