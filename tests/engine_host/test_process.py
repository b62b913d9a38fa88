"""The engine in a real child process: framing, death, restart, orphans."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.types import SessionId, TurnId
from session_server.core.commands import CancelTurn, CloseSession, ReportMemory
from session_server.core.errors import EngineUnavailable
from session_server.core.events import (
    EngineDied,
    EngineReady,
    EngineResumed,
    EngineStalled,
    MemoryReported,
    SessionGone,
)
from session_server.engine_host.child import EXIT_BUG, EXIT_ORPHANED, EXIT_UNUSABLE, _Child
from session_server.engine_host.process import (
    EngineProcess,
    ProcessSettings,
    _ChildConnection,
)
from session_server.engine_host.restarts import RestartPolicy
from session_server.engine_host.transport import (
    MAX_EVENTS_BYTES,
    MAX_FRAME_BYTES,
    Codec,
    FrameBuffer,
    TransportError,
    frame,
)
from session_server.engine_host.watchdog import HANG_LIMIT_S, SILENCE_LIMIT_S
from tests.engine_host.live_echo import BUG_TOKEN, GRIP_TOKEN, HANG_TOKEN, LiveStage
from tests.engine_host.server_side import ServerSide, submit
from tests.rig.processes import assert_gone, is_alive
from tests.sim.echo import replay

CHILD = str(Path(__file__).with_name("echo_child.py"))


def engine(
    stage: LiveStage | None = None,
    *,
    pause_s: float = 0.05,
    max_failures: int = 5,
    hang_limit_s: float = HANG_LIMIT_S,
) -> EngineProcess:
    argv = (sys.executable, CHILD)
    settings = msgspec.msgpack.encode(stage or LiveStage())
    restarts = RestartPolicy(backoff_first_s=pause_s, max_failures=max_failures)
    return EngineProcess(
        ProcessSettings(
            argv, settings, stop_timeout_s=5.0, hang_limit_s=hang_limit_s, restarts=restarts
        )
    )


# Frames


@given(payloads=st.lists(st.binary(max_size=40), max_size=8), seed=st.integers(0, 1000))
def test_frames_survive_however_the_bytes_arrive(payloads: list[bytes], seed: int) -> None:
    stream, buffer = b"".join(frame(p) for p in payloads), FrameBuffer()
    cuts, got, start = random.Random(seed), list[bytes](), 0
    while start < len(stream):
        end = start + cuts.randint(1, 9)
        got += buffer.feed(stream[start:end])
        start = end
    assert got == payloads


def test_a_frame_beyond_the_bound_is_refused_on_both_sides() -> None:
    with pytest.raises(TransportError):
        FrameBuffer().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_a_transport_error_or_a_message(payload: bytes) -> None:
    codec = Codec()
    for decode in (codec.command, codec.events):
        try:
            decode(payload)
        except TransportError:
            continue


def test_commands_and_events_cross_unchanged() -> None:
    codec, buffer = Codec(), FrameBuffer()
    command = CancelTurn(turn_id=TurnId("t"), num_outputs=None)
    events = [SessionGone(session_id=SessionId("s")), EngineDied(message="x", will_restart=True)]
    stream = codec.command_frame(command) + b"".join(codec.event_frames(events))
    first, second = buffer.feed(stream)
    assert codec.command(first) == command
    assert codec.events(second) == events


@pytest.mark.parametrize(("excess", "num_frames"), [(-1, 1), (0, 1), (1, 2)])
def test_events_of_a_step_beyond_the_bound_take_more_frames_in_order(
    excess: int, num_frames: int
) -> None:
    codec = Codec()
    ends = [SessionGone(session_id=SessionId(f"s_{i}")) for i in range(9)]
    (short,) = codec.event_frames([EngineDied(message="", will_restart=True), *ends])
    # A message of so many bytes takes two more bytes for its length; the frame has four.
    size = MAX_EVENTS_BYTES - len(short) + 4 - 2 + excess
    events = [EngineDied(message="x" * size, will_restart=True), *ends]
    payloads = FrameBuffer().feed(b"".join(codec.event_frames(events)))
    assert len(payloads) == num_frames
    assert max(map(len, payloads)) <= MAX_EVENTS_BYTES
    assert [event for payload in payloads for event in codec.events(payload)] == events


def test_an_event_larger_than_the_bound_travels_alone() -> None:
    codec = Codec()
    gone = SessionGone(session_id=SessionId("s"))
    large = EngineDied(message="x" * MAX_EVENTS_BYTES, will_restart=True)
    payloads = FrameBuffer().feed(b"".join(codec.event_frames([gone, large, gone])))
    assert [codec.events(payload) for payload in payloads] == [[gone], [large], [gone]]


# Lives


def test_turns_in_a_child_say_what_they_would_say_alone_and_the_child_leaves_when_told() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine()
        ready = await client.start(server.hear)
        assert (ready.epoch, ready.device) == (1, "echo")
        assert await server.turn(client, "t", (1, 2, 3)) == replay(
            "a", (1, 2, 3), seed=1, max_new=5
        )
        pid = client.pid
        assert pid is not None
        await client.stop()
        await client.stop()
        assert not is_alive(pid)
        with pytest.raises(EngineUnavailable):
            client.send(CloseSession(session_id=SessionId("s-t")))
        assert not any(isinstance(e, EngineDied) for e in server.events), "leaving is not dying"

    asyncio.run(scenario())


def test_a_killed_engine_is_replaced_by_one_that_knows_no_session() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage(forward_s=0.01), max_failures=1)
        await client.start(server.hear)
        submit(client, "lost", (1, 2, 3), max_tokens=300)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        death = await server.death()
        assert death.will_restart
        assert "-9" in death.message
        ready = await server.revival()
        assert ready.epoch == 2
        client.send(ReportMemory(request_id=1))
        report = await server.until(lambda e: isinstance(e, MemoryReported))
        assert isinstance(report, MemoryReported)
        assert report.sessions == ()
        assert await server.turn(client, "t", (4, 5)) == replay("a", (4, 5), seed=1, max_new=5)
        # One that served a turn in between does not count as failing in a row.
        start = len(server.events)
        os.kill(client.pid, signal.SIGKILL)
        death_of_the_second = await server.until(lambda e: isinstance(e, EngineDied), start=start)
        assert isinstance(death_of_the_second, EngineDied)
        assert death_of_the_second.will_restart
        await client.stop()

    asyncio.run(scenario())


def test_while_there_is_no_engine_commands_are_refused_and_not_lost_in_silence() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(pause_s=5.0)
        await client.start(server.hear)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await server.death()
        with pytest.raises(EngineUnavailable):
            submit(client, "t", (1, 2))
        await client.stop()

    asyncio.run(scenario())


def test_a_bug_in_the_engine_ends_its_process_with_its_last_words() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine()
        await client.start(server.hear)
        submit(client, "t", (BUG_TOKEN, 1))
        death = await server.death()
        assert "a bug on purpose" in death.message
        assert "exit code 70" in death.message
        await server.revival()
        await client.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(("token", "hang_limit_s"), [(HANG_TOKEN, 2.5), (GRIP_TOKEN, 1.0)])
def test_a_device_that_hangs_ends_the_engine_though_it_is_still_asked_and_answers(
    token: int, hang_limit_s: float, capfd: pytest.CaptureFixture[str]
) -> None:
    """What counts is turns that move: a loop that runs, or answers, is no progress."""

    async def scenario() -> None:
        server, client = ServerSide(), engine(hang_limit_s=hang_limit_s)
        await client.start(server.hear)
        assert await server.turn(client, "before", (1, 2))
        submit(client, "t", (token, 1))

        async def ask() -> None:
            while True:
                with contextlib.suppress(EngineUnavailable):
                    client.send(ReportMemory(request_id=1))
                await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask())
        death = await server.death()
        assert f"moved no turn for {hang_limit_s:g} s" in death.message
        stalls = [e for e in server.events if isinstance(e, EngineStalled)]
        assert len(stalls) == (hang_limit_s > SILENCE_LIMIT_S)
        await server.revival()
        asking.cancel()
        assert await server.turn(client, "after", (1, 2))
        await client.stop()

    asyncio.run(scenario())
    # The engine said where each of its threads was.
    assert "live_echo.py" in capfd.readouterr().err


def test_an_engine_that_is_stopped_says_so_by_its_silence_and_goes_on_when_it_may() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine()
        await client.start(server.hear)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        stall = await server.until(lambda e: isinstance(e, EngineStalled))
        assert isinstance(stall, EngineStalled)
        assert stall.stalled_s >= SILENCE_LIMIT_S
        os.kill(client.pid, signal.SIGCONT)
        await server.until(lambda e: isinstance(e, EngineResumed))
        assert await server.turn(client, "t", (1, 2))
        await client.stop()
        told = [e for e in server.events if isinstance(e, EngineStalled | EngineResumed)]
        assert len(told) == 2, "once each"

    asyncio.run(scenario())


def test_an_engine_that_is_stopped_while_it_has_turns_is_replaced() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage(forward_s=0.01), hang_limit_s=1.0)
        await client.start(server.hear)
        submit(client, "t", (1, 2), max_tokens=300)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGSTOP)
        death = await server.death()
        assert "exit code -9" in death.message
        await server.revival()
        await client.stop()

    asyncio.run(scenario())


DEAF = """
import sys
sys.path.insert(0, {root!r})
from session_server.engine_host.child import serve_engine
from session_server.engine_host.transport import Codec
from tests.engine_host.live_echo import assemble

def broken(codec, payload):
    raise KeyError("a bug of the reader")

Codec.command = broken
sys.exit(serve_engine(int(sys.argv[1]), assemble))
"""


def test_an_engine_whose_reader_breaks_does_not_live_on_deaf() -> None:
    async def scenario() -> None:
        root = str(Path(__file__).resolve().parents[2])
        argv = (sys.executable, "-c", DEAF.format(root=root))
        server = ServerSide()
        client = EngineProcess(ProcessSettings(argv, msgspec.msgpack.encode(LiveStage())))
        await client.start(server.hear)
        submit(client, "t", (1, 2))
        async with asyncio.timeout(60):
            assert (await server.death()).will_restart
        await client.stop()

    asyncio.run(scenario())


def test_a_supervisor_that_breaks_is_heard() -> None:
    async def scenario() -> None:
        client = engine()

        def hear(event: object) -> None:
            if isinstance(event, EngineDied):
                raise RuntimeError("a bug of the listener")

        await client.start(hear)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        assert client.failed is not None
        async with asyncio.timeout(60):
            assert "supervisor" in await client.failed
        await client.stop()

    asyncio.run(scenario())


def test_an_engine_that_keeps_dying_is_given_up_and_the_server_can_leave_with_an_error() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine(max_failures=1)
        await client.start(server.hear)
        for epoch in (1, 2):
            submit(client, f"t{epoch}", (BUG_TOKEN, 1))
            start = len(server.events)
            await server.until(lambda e: isinstance(e, EngineDied), start=start)
            if epoch == 1:
                await server.until(lambda e: isinstance(e, EngineReady), start=start)
        assert client.failed is not None
        async with asyncio.timeout(60):
            assert "a bug on purpose" in await client.failed
        deaths = [e for e in server.events if isinstance(e, EngineDied)]
        assert [death.will_restart for death in deaths] == [True, False]
        await client.stop()

    asyncio.run(scenario())


def test_a_start_that_fails_says_what_the_child_said() -> None:
    async def scenario() -> None:
        client = engine(LiveStage(fails_to_build=True))
        with pytest.raises(EngineUnavailable, match="no such model"):
            await client.start(lambda event: None)
        missing = EngineProcess(ProcessSettings(("/nonexistent/engine",), b""))
        with pytest.raises(EngineUnavailable, match="did not start"):
            await missing.start(lambda event: None)

    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "is_final"), [(EXIT_UNUSABLE, True), (EXIT_BUG, False)])
def test_a_first_start_tells_settings_that_no_engine_can_serve(
    status: int, *, is_final: bool
) -> None:
    argv = (sys.executable, "-c", f"raise SystemExit({status})")
    with pytest.raises(EngineUnavailable) as refused:
        asyncio.run(EngineProcess(ProcessSettings(argv, b"")).start(lambda event: None))
    assert refused.value.is_final == is_final


def test_a_restart_that_finds_no_socket_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server out of file descriptors for a moment must not be without an engine for good."""

    async def scenario() -> None:
        server, client = ServerSide(), engine(LiveStage())
        await client.start(server.hear)
        pair, failures = socket.socketpair, [OSError("too many open files")]

        def fail_once() -> tuple[socket.socket, socket.socket]:
            if failures:
                raise failures.pop()
            return pair()

        monkeypatch.setattr(socket, "socketpair", fail_once)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        await server.revival()
        assert not failures
        deaths = [event for event in server.events if isinstance(event, EngineDied)]
        assert [death.will_restart for death in deaths] == [True, True]
        await client.stop()

    asyncio.run(scenario())


def test_signals_meant_for_the_server_do_not_end_the_engine() -> None:
    async def scenario() -> None:
        server, client = ServerSide(), engine()
        await client.start(server.hear)
        assert client.pid is not None
        # Ctrl-C during its imports, before it ignores the signal, would print a traceback.
        assert os.getpgid(client.pid) == client.pid
        os.kill(client.pid, signal.SIGINT)
        os.kill(client.pid, signal.SIGTERM)
        await server.turn(client, "t", (1, 2))
        await client.stop()

    asyncio.run(scenario())


def test_a_connection_whose_waiter_was_canceled_ends_in_peace() -> None:
    async def scenario() -> None:
        process = cast("subprocess.Popen[bytes]", None)  # it has no part in this
        connection = _ChildConnection(process, lambda event: None)
        connection.ready.cancel()
        connection.lost.cancel()  # as a second Ctrl-C does, by way of the supervisor
        connection.connection_lost(None)

    asyncio.run(scenario())


def test_a_reader_of_a_socket_that_its_process_closed_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    ours, theirs = socket.socketpair()
    child = _Child(theirs)
    ours.close()
    theirs.close()
    child._read_commands()
    assert not exits, "the exit status of `serve` counts"
    assert not capsys.readouterr().err


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_server_that_was_killed_before_it_read_everything_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_ready: bool
) -> None:
    """The system then resets the socket, where it would end it otherwise."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    ours, theirs = socket.socketpair()
    child = _Child(theirs)
    theirs.sendall(b"an event")
    ours.close()
    if is_ready:
        child._read_commands()
        assert exits == [EXIT_ORPHANED]
    else:
        assert child._read_settings() is None
    theirs.close()
    assert not capsys.readouterr().err


PARENT = """
import asyncio, sys
sys.path.insert(0, {root!r})
from tests.engine_host.test_process import engine
async def main():
    client = engine()
    await client.start(lambda event: None)
    print(client.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_an_engine_does_not_outlive_a_server_that_was_killed() -> None:
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", PARENT.format(root=root)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
    assert_gone([pid])
