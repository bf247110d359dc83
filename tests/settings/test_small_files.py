"""Reading of small files: other kinds of files and hanging file systems give an error and block nothing."""

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

from dispatcher.features.models.warm_up_files import WarmupFile
from dispatcher.features.models.warmup import WarmupRules
from dispatcher.settings.load import read_config
from dispatcher.settings.small_files import BackgroundRead, read_regular_file, read_with_timeout
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.watched_files import MAX_TOKEN_BYTES, TokenFileError, TokenReader, read_token
from dispatcher.settings.yaml_source import Problem


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server_socket:
        server_socket.bind(str(path))


@pytest.fixture(params=[make_pipe, make_socket, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def irregular_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a path that exists and is no regular file. Opening a pipe without O_NONBLOCK would block."""
    path = tmp_path / "file"
    make_file: Callable[[Path], None] = request.param
    make_file(path)
    return path


def test_only_regular_files_are_read(irregular_path: Path) -> None:
    with pytest.raises(OSError, match=r"regular file|directory|No such device"):
        read_regular_file(irregular_path, 100)


def test_links_to_a_file_are_followed(tmp_path: Path) -> None:
    """A file of a mounted ConfigMap is a link into a directory that is itself a link."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026" / "file").write_bytes(b"text")
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "file").symlink_to("..data/file")
    assert read_regular_file(tmp_path / "file", 100) == b"text"
    assert read_regular_file(tmp_path / "file", 2) == b"tex", "one byte more than the limit"


def test_token_file_that_is_not_a_regular_file_cannot_be_read(irregular_path: Path) -> None:
    with pytest.raises(TokenFileError, match="cannot be read") as raised:
        read_token(irregular_path)
    assert not raised.value.is_readable


def test_huge_token_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"t" * (MAX_TOKEN_BYTES + 1))
    with pytest.raises(TokenFileError, match="larger than 64 KiB"):
        read_token(tmp_path / "token")


def test_configuration_that_is_not_a_regular_file_is_a_problem(irregular_path: Path) -> None:
    found = read_config(irregular_path)
    assert isinstance(found, Problem)
    assert "cannot be read" in found.what


def test_warm_up_that_is_not_a_regular_file_is_a_problem(irregular_path: Path) -> None:
    assert "cannot be read" in str(
        WarmupFile(irregular_path, "models[0].warmup", WarmupRules("/v1/completions")).read()
    )


@pytest.mark.parametrize("settings", [{"ca_file": "{}"}, {"cert_file": "{}", "key_file": "{}"}])
def test_certificate_that_is_not_a_regular_file_is_an_error(
    irregular_path: Path, settings: dict[str, str]
) -> None:
    tls = TlsSettings(**{name: text.format(irregular_path) for name, text in settings.items()})  # type: ignore[arg-type]
    with pytest.raises(OSError, match=r"regular file|directory|No such device"):
        tls.build_context()


class HangingRead:
    """A read on a file system that does not answer until `release` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.reads = 0

    def __call__(self) -> int:
        self.reads += 1
        self.release.wait()
        return self.reads


async def test_hanging_read_times_out_and_is_not_started_again() -> None:
    hanging_read = HangingRead()
    background = BackgroundRead(hanging_read, timeout_s=0)
    for _ in range(3):
        with pytest.raises(TimeoutError, match="file system does not answer"):
            await background()
    assert hanging_read.reads == 1
    hanging_read.release.set()
    healthy_read = BackgroundRead(hanging_read)
    assert await healthy_read() == 2
    assert await healthy_read() == 3, "each call reads again"


async def test_concurrent_callers_share_a_read_and_may_be_cancelled() -> None:
    hanging_read = HangingRead()
    background = BackgroundRead(hanging_read, timeout_s=30)
    cancelled, first_caller, second_caller = (asyncio.create_task(background()) for _ in range(3))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    hanging_read.release.set()
    assert [await first_caller, await second_caller] == [1, 1]
    assert cancelled.cancelled()


async def test_error_of_a_read_is_raised() -> None:
    def fail() -> None:
        raise TimeoutError("from the read")

    with pytest.raises(TimeoutError, match="from the read"):
        await BackgroundRead(fail)()
    with pytest.raises(TimeoutError, match="from the read"):
        read_with_timeout(fail)


def test_blocking_read_times_out() -> None:
    hanging_read = HangingRead()
    with pytest.raises(TimeoutError, match="file system does not answer"):
        read_with_timeout(hanging_read, timeout_s=0)
    hanging_read.release.set()


async def test_token_reader_reads_the_given_file_anew_each_time(tmp_path: Path) -> None:
    tokens = TokenReader()
    for name in ("one", "two", "one"):
        (tmp_path / name).write_text(name)
        assert await tokens.read_token(str(tmp_path / name)) == name
    (tmp_path / "one").write_text("anew")
    assert await tokens.read_token(str(tmp_path / "one")) == "anew"


PROGRAM_WITH_HANGING_READ = """
import asyncio, contextlib, threading
from dispatcher.settings.small_files import BackgroundRead

async def main():
    with contextlib.suppress(TimeoutError):
        await BackgroundRead(threading.Event().wait, timeout_s=0)()

asyncio.run(main())
print("ended")
"""


def test_process_can_end_while_a_read_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITH_HANGING_READ], capture_output=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == (b"ended\n", b"")


def test_dev_null_is_an_empty_file() -> None:
    """`--config /dev/null` is the usual way to say that there is no configuration."""
    assert read_regular_file("/dev/null", 10) == b""
