"""Proof that the process of an owner has ended, with real processes, namespaces and hostile neighbours."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from dispatcher.queue import owners
from dispatcher.queue.owners import NO_SCOPE, register_owner
from tests.support import require_tool, running_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has abstract sockets")

BE_AN_OWNER = """
import sys
from dispatcher.queue.owners import register_owner
with register_owner() as registered:
    print(registered.owner, flush=True)
    sys.stdin.read()
"""
HAVE_A_CHILD = """
import subprocess, sys
from dispatcher.queue.owners import register_owner
with register_owner() as registered:
    child = subprocess.Popen(["sleep", "1000"])
    print(registered.owner, child.pid, flush=True)
    sys.stdin.read()
"""


@contextmanager
def owner_process(
    *before: str, code: str = BE_AN_OWNER
) -> Iterator[tuple[list[str], subprocess.Popen[bytes]]]:
    """Start a process that is an owner until its standard input ends. Return it and the words that it
    printed."""
    command = [*before, sys.executable, "-c", code]
    with running_process(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().split(), process


def end_process(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGKILL) -> None:
    process.send_signal(how)
    process.wait(10)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_owner_is_proven_ended_only_after_its_process_ended(how: signal.Signals) -> None:
    with register_owner() as me, owner_process() as ([owner], process):
        assert me.find_ended_owners([owner]) == []
        end_process(process, how)
        assert me.find_ended_owners([owner]) == [owner]
        assert me.find_ended_owners([owner]) == [owner], "the question has no effect"


def test_stopped_process_counts_as_alive() -> None:
    with register_owner() as me, owner_process() as ([owner], process):
        process.send_signal(signal.SIGSTOP)
        assert me.find_ended_owners([owner]) == []
        process.send_signal(signal.SIGCONT)


def test_zombie_counts_as_ended() -> None:
    """Its parent has not waited for it yet, but it holds no socket any more."""
    with register_owner() as me, owner_process() as ([owner], process):
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert me.find_ended_owners([owner]) == [owner]


def test_child_of_a_dead_owner_does_not_keep_its_name() -> None:
    with register_owner() as me, owner_process(code=HAVE_A_CHILD) as ([owner, child], process):
        try:
            end_process(process)
            os.kill(int(child), 0)
            assert me.find_ended_owners([owner]) == [owner]
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_owner_that_left_its_block_counts_as_ended() -> None:
    with register_owner() as me:
        with register_owner() as other:
            assert me.find_ended_owners([other.owner]) == []
        assert me.find_ended_owners([other.owner]) == [other.owner]


def test_owner_never_reports_itself_as_ended() -> None:
    with register_owner() as me:
        assert me.find_ended_owners([me.owner]) == []
    assert me.find_ended_owners([me.owner]) == [], "not even if that is true"


def test_owner_of_another_network_namespace_is_never_proven_ended() -> None:
    unshare = require_tool("unshare")
    if subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may make no network namespace")
    with register_owner() as me, owner_process(unshare, "-n") as ([owner], process):
        assert me.find_ended_owners([owner]) == []
        end_process(process)
        assert me.find_ended_owners([owner]) == [], "it may be alive in another namespace"


@pytest.mark.parametrize(
    "stranger",
    ["host:4711:0a1b2c3d", "host:4711:-:0011223344556677", "dispatcher-1", "", "a:b:c:d", "::::"],
)
def test_ids_without_a_scope_are_never_proven_ended(stranger: str) -> None:
    """Such ids come from other systems and other programs."""
    with register_owner() as me:
        assert me.find_ended_owners([stranger]) == []


def test_owner_without_a_bound_name_is_never_proven_ended() -> None:
    """If the system does not allow a name, the id says so, and others wait for its silence."""
    with register_owner() as me, register_owner(scope=NO_SCOPE) as nameless:
        assert nameless.owner.split(":")[2] == NO_SCOPE
        assert me.find_ended_owners([nameless.owner]) == []
        assert nameless.find_ended_owners([me.owner]) == []


def test_process_that_holds_the_name_of_an_ended_owner_hides_its_end() -> None:
    with register_owner() as me:
        with register_owner() as other:
            pass
        with socket.socket(socket.AF_UNIX) as squatter:
            squatter.bind(owners._socket_name(other.owner))
            assert me.find_ended_owners([other.owner]) == []
        assert me.find_ended_owners([other.owner]) == [other.owner]


def test_other_sockets_with_the_name_change_nothing() -> None:
    with register_owner() as me, owner_process() as ([owner], process):
        name = owners._socket_name(owner)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as another_kind:
            another_kind.bind(name)
            assert me.find_ended_owners([owner]) == []
            end_process(process)
            assert me.find_ended_owners([owner]) == [owner]


def test_owners_found_in_a_locked_directory_count_as_ended() -> None:
    """This applies to owners of any scope, unless their names are held."""
    with register_owner() as rebel, register_owner(is_embedded=True) as me:
        found = ["other-host:1:0123456789abcdef:00", "host:4711:0a1b2c3d", rebel.owner, me.owner]
        assert me.find_ended_owners(found) == found[:2]
        assert me.find_ended_owners(["later:2:0123456789abcdef:00", *found]) == found[:2], (
            "later owners do not count as ended"
        )


def test_empty_directory_proves_nothing() -> None:
    with register_owner(is_embedded=True) as me:
        assert me.find_ended_owners([]) == []
        assert me.find_ended_owners(["host:4711:0a1b2c3d"]) == []


def test_owner_ids_are_unique_and_short_enough_for_a_socket_name() -> None:
    with ExitStack() as stack:
        made = [stack.enter_context(register_owner()).owner for _ in range(50)]
        assert len(set(made)) == 50
        assert {len(owners._socket_name(owner)) for owner in [*made, "h" * 255]} == {50}
