"""The event loop of `run` logs defects, and not connections that were lost."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.cli.run import _loop_factory


async def write_to_closed_transport() -> None:
    """Raise the error of uvloop for a write to a connection that the peer has closed."""
    listening = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.read()
        writer.transport.abort()
        await asyncio.sleep(0)
        writer.transport.write(b"x")


async def raise_in_callback() -> None:
    raise RuntimeError("defect")


@pytest.mark.parametrize(
    ("failing", "logged"), [(write_to_closed_transport, False), (raise_in_callback, True)]
)
def test_loop_logs_a_defect_and_not_a_lost_connection(
    failing: object, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def report() -> None:
        with pytest.raises(RuntimeError) as caught:
            await failing()  # type: ignore[operator]
        asyncio.get_running_loop().call_exception_handler(
            {"message": "Fatal error on SSL protocol", "exception": caught.value}
        )

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(report())
    assert bool(caplog.records) == logged
