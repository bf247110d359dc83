"""Paths that are no regular files, and file systems that hang, give an error and block nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dispatcher.core.models.warmup import WarmupRules
from dispatcher.settings import TlsSettings
from dispatcher.settings.load import read_config
from dispatcher.settings.small_files import BackgroundRead, read_regular_file, read_with_timeout
from dispatcher.settings.warmups import read_warmup_file
from dispatcher.settings.watched_files import MAX_TOKEN_BYTES, TokenFileError, TokenReader, read_token
from dispatcher.settings.yaml_source import Problem


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


@pytest.fixture(params=[pipe, bound_socket, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def irregular(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a path that exists and is no regular file. Opening a pipe without O_NONBLOCK would block."""
    path = tmp_path / "file"
    make: Callable[[Path], None] = request.param
    make(path)
    return path


def test_only_regular_files_are_read(irregular: Path) -> None:
    with pytest.raises(OSError, match=r"regular file|directory|No such device"):
        read_regular_file(irregular, 100)


def test_links_to_a_file_are_followed(tmp_path: Path) -> None:
    """A file of a mounted ConfigMap is a link into a directory that is itself a link."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "file").write_bytes(b"text")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "file").symlink_to("..data/file")
    assert read_regular_file(tmp_path / "file", 100) == b"text"
    assert read_regular_file(tmp_path / "file", 2) == b"tex", "one byte more than was asked for"


def test_a_token_file_that_is_no_file_cannot_be_read(irregular: Path) -> None:
    with pytest.raises(TokenFileError, match="cannot be read") as raised:
        read_token(irregular)
    assert not raised.value.is_readable


def test_a_huge_token_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"t" * (MAX_TOKEN_BYTES + 1))
    with pytest.raises(TokenFileError, match="larger than 64 KiB"):
        read_token(tmp_path / "token")


def test_a_configuration_that_is_no_file_is_a_problem(irregular: Path) -> None:
    found = read_config(irregular)
    assert isinstance(found, Problem)
    assert "cannot be read" in found.what


def test_a_warm_up_that_is_no_file_is_a_problem(irregular: Path) -> None:
    assert "cannot be read" in str(read_warmup_file(irregular, WarmupRules("/v1/completions")))


@pytest.mark.parametrize("settings", [{"ca_file": "{}"}, {"cert_file": "{}", "key_file": "{}"}])
def test_a_certificate_that_is_no_file_is_an_error(irregular: Path, settings: dict[str, str]) -> None:
    tls = TlsSettings(**{name: text.format(irregular) for name, text in settings.items()})  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"regular file|directory|No such device"):
        tls.build_context()


class Hanging:
    """A read on a file system that does not answer until `let` is set."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        self.let.wait()
        return self.reads


async def test_a_read_that_hangs_is_given_up_and_not_begun_again() -> None:
    hanging = Hanging()
    background = BackgroundRead(hanging, timeout_s=0)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="file system does not answer"):
            await background()
    assert hanging.reads == 1
    hanging.let.set()
    healthy = BackgroundRead(hanging)
    assert await healthy() == 2
    assert await healthy() == 3, "each call reads anew"


async def test_callers_that_come_together_share_a_read_and_may_leave_it() -> None:
    hanging = Hanging()
    background = BackgroundRead(hanging, timeout_s=30)
    leaves, stays, comes = (asyncio.create_task(background()) for _ in range(3))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.wait([leaves])
    hanging.let.set()
    assert [await stays, await comes] == [1, 1]
    assert leaves.cancelled()


async def test_what_a_read_raises_is_raised() -> None:
    def fail() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="of its own"):
        await BackgroundRead(fail)()
    with pytest.raises(TimeoutError, match="of its own"):
        read_with_timeout(fail)


def test_a_blocking_read_is_given_up() -> None:
    hanging = Hanging()
    with pytest.raises(TimeoutError, match="file system does not answer"):
        read_with_timeout(hanging, timeout_s=0)
    hanging.let.set()


async def test_a_token_reader_reads_the_file_that_it_is_asked_for(tmp_path: Path) -> None:
    tokens = TokenReader()
    for name in ("one", "two", "one"):
        (tmp_path / name).write_text(name)
        assert await tokens.read_token(str(tmp_path / name)) == name
    (tmp_path / "one").write_text("anew")
    assert await tokens.read_token(str(tmp_path / "one")) == "anew"


ENDS = """
import asyncio, contextlib, threading
from dispatcher.settings.small_files import BackgroundRead

async def main():
    with contextlib.suppress(TimeoutError):
        await BackgroundRead(threading.Event().wait, timeout_s=0)()

asyncio.run(main())
print("ended")
"""


def test_a_process_ends_while_a_read_hangs() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == (b"ended\n", b"")


def test_dev_null_is_an_empty_file() -> None:
    """`--config /dev/null` is the usual way to say that there is no configuration."""
    assert read_regular_file("/dev/null", 10) == b""
