"""The terminal client as a process of its own, against a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec
import pytest
import trustme
from websockets import ConnectionClosed

from session_server.chat import describe
from session_server.client import TurnResult
from session_server.core.child_process import PROGRAM
from session_server.core.events import TurnTimings
from session_server.core.session_events import TokenUsage
from tests.client.scripted_server import Peer, document, playing

RESUME = shlex.join([*PROGRAM, "chat"])
USAGE = {"input_tokens": 640, "cached_tokens": 480, "cache_write_tokens": 160, "output_tokens": 32}


async def chat(url: str, *flags: str, stdout: int = PIPE) -> Process:
    argv = [sys.executable, "-m", "session_server", "chat", "--url", url, *flags]
    return await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=stdout, stderr=PIPE)


async def read_until(process: Process, needle: str) -> str:
    assert process.stdout is not None
    seen = ""
    while needle not in seen:
        piece = await process.stdout.read(4096)
        assert piece, f"ended before {needle!r}:\n{seen}"
        seen += piece.decode()
    return seen


async def finish(process: Process, *lines: str) -> str:
    text = "".join(f"{line}\n" for line in lines)
    out, err = await process.communicate(text.encode())
    assert process.returncode == 0, err.decode()
    return out.decode()


async def answer(
    peer: Peer, seq: int, text: str, *, durable: bool | None = None
) -> dict[str, object]:
    create = await peer.receive()
    await peer.send("turn.delta", seq=seq, turn_id=create["turn_id"], text=text, n=1)
    await peer.complete(seq + 1, create["turn_id"], text, durable=durable)
    return create


def test_the_command_that_resumes_can_be_copied(tmp_path: Path) -> None:
    """It names the program as it was called and the file that was given, and shows no key."""
    authority = tmp_path / "the authority.pem"
    trustme.CA().cert_pem.write_to_path(authority)
    program = tmp_path / "session-server"
    program.write_text("from session_server.cli import main\nraise SystemExit(main())\n")

    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.left()

    async def test() -> None:
        async with playing(script) as server:
            flags = ["--url", server.url, "--ca-file", str(authority), "--session", "s_1"]
            argv = [sys.executable, str(program), "chat", "--api-key", "sk-1", *flags]
            process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
            shown = await finish(process, "/quit")
        _, _, resume = shown.partition("resume it: ")
        assert shlex.split(resume) == ["SESSION_SERVER_API_KEY=KEY", str(program), "chat", *flags]

    asyncio.run(test())


def timings(ttft_ms: float, decode_ms: float = 0.0) -> TurnTimings:
    fields: dict[str, float] = dict.fromkeys(TurnTimings.__struct_fields__, 0)
    return msgspec.convert(fields | {"ttft_ms": ttft_ms, "decode_ms": decode_ms}, TurnTimings)


def result(**changes: object) -> TurnResult:
    fields: dict[str, object] = {
        "turn_id": "t",
        "status": "completed",
        "text": "x",
        "finish_reason": "stop",
        "usage": msgspec.convert(USAGE, TokenUsage),
        "timings": timings(24.2, 387.5),
    }
    return TurnResult(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("turn", "line"),
    [
        (result(), "in 640 (480 cached, 160 new) · out 32 · ttft 24 ms · 80 tok/s"),
        (result(timings=timings(3, 0.5)), "ttft 3 ms · 62000 tok/s"),
        (result(timings=timings(3)), "in 640 (480 cached, 160 new) · out 32 · ttft 3 ms"),
        (result(status="cancelled", finish_reason=None), "80 tok/s · cancelled"),
        (result(finish_reason="length"), "80 tok/s · cut at max tokens"),
    ],
)
def test_a_turn_is_described_by_what_it_cost(turn: TurnResult, line: str) -> None:
    assert describe(turn).endswith(line)


def test_a_line_is_answered_and_followed_by_its_cost() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        create = await answer(peer, 1, "Noted [sic].")
        assert create["input"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "I am Ada"},
        ]
        await answer(peer, 3, "Ada.")
        await peer.closed(5)

    async def test() -> None:
        async with playing(script) as server:
            process = await chat(server.url, "--system", "be brief")
            shown = await finish(process, "I am Ada", "Who am I?", "/stats", "/nonsense", "/quit")
        assert "Noted [sic]." in shown
        assert "in 10 (7 cached, 3 new)" in shown
        assert "no such command: /nonsense" in shown

    asyncio.run(test())


def test_thoughts_stand_before_the_answer_and_calls_behind_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        turn_id = (await peer.receive())["turn_id"]
        thought = {"turn_id": turn_id, "text": "", "n": 1, "reasoning": "Hm."}
        await peer.send("turn.delta", seq=1, **thought)
        await peer.send("turn.delta", seq=2, turn_id=turn_id, text="I look.", n=1)
        call = {"id": "c", "name": "weather", "arguments": '{"city": [1]}'}
        await peer.complete(3, turn_id, "I look.", reasoning="Hm.", tool_calls=[call])
        await peer.closed(4)

    async def test() -> None:
        async with playing(script) as server:
            shown = await finish(await chat(server.url), "hello")
        assert 'Hm.\n\nI look.\ncalls weather({"city": [1]})' in shown

    asyncio.run(test())


def test_new_opens_another_session_and_the_end_of_input_leaves() -> None:
    async def first(peer: Peer) -> None:
        await peer.hello()
        await peer.closed(1)

    async def second(peer: Peer) -> None:
        await peer.hello()
        create = await answer(peer, 1, "Aye.")
        assert create["input"] == [
            {"role": "system", "content": "be a pirate"},
            {"role": "user", "content": "hello"},
        ]
        await peer.closed(3)

    async def test() -> None:
        async with playing(first, second) as server:
            shown = await finish(await chat(server.url), "/system be a pirate", "hello")
        assert "Aye." in shown

    asyncio.run(test())


@pytest.mark.parametrize("leaves", ["/quit", "/exit", "/keep", "the end of input"])
def test_a_session_that_was_resumed_is_never_closed(leaves: str) -> None:
    async def script(peer: Peer) -> None:
        assert peer.path == "/v1/sessions/s_1/ws"
        await peer.hello()
        await peer.left()

    async def test() -> None:
        async with playing(script) as server:
            process = await chat(server.url, "--session", "s_1")
            shown = await finish(process, *([leaves] if leaves.startswith("/") else []))
            assert "kept: s_1" in shown
            assert f"{RESUME} --url {server.url} --session s_1" in shown

    asyncio.run(test())


@pytest.mark.parametrize(
    ("turns", "told"), [(1, "goes on from 1 turn, 33 tokens"), (2, "goes on from 2 turns, 33")]
)
def test_a_session_that_is_resumed_shows_what_it_goes_on_from(turns: int, told: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.left()

    past = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "I am Ada."},
        {"role": "assistant", "content": "Noted."},
        {"role": "user", "content": "Who\x1b[2J am [b]I[/b]?"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "told by a tool"},
        {"role": "assistant", "content": f"Ada{'!' * 2000}."},
    ]

    async def test() -> None:
        answers = document({"turns": turns, "tokens": 33}), document({"data": past})
        async with playing(script, *answers) as server:
            shown = await finish(await chat(server.url, "--session", "s_1"), "/quit")
        assert told in shown
        assert "you > Who\\x1b[2J am [b]I[/b]?\n it > Ada!!!" in shown
        assert "! ... !" in shown.replace("\n", " ")
        assert "Noted." not in shown
        assert "told by a tool" not in shown

    asyncio.run(test())


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("leaves", ["/quit", "/new", "the end of input"])
def test_a_conversation_that_a_server_keeps_on_disk_stays_there(leaves: str, durable: bool) -> None:
    """One that the disk did not take is there as well, and is written once there is room."""

    async def script(peer: Peer) -> None:
        await peer.hello()
        await answer(peer, 1, "Aye.", durable=durable)
        await peer.left()

    async def unused(peer: Peer) -> None:
        await peer.hello()
        await peer.closed(1)

    async def test() -> None:
        async with playing(script, *([unused] if leaves == "/new" else [])) as server:
            process = await chat(server.url)
            shown = await finish(process, "hello", *([leaves] if leaves.startswith("/") else []))
            assert shown.count("kept: s_1") == 1
            assert f"{RESUME} --url {server.url} --session s_1" in shown

    asyncio.run(test())


@pytest.mark.parametrize("flags", [(), ("--session", "s_1")])
def test_a_session_is_deleted_where_its_user_says_so(flags: tuple[str, ...]) -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await answer(peer, 1, "Aye.", durable=True)
        await peer.closed(3)

    async def test() -> None:
        async with playing(script) as server:
            shown = await finish(await chat(server.url, *flags), "hello", "/forget")
        assert "kept" not in shown

    asyncio.run(test())


def test_an_interrupt_at_the_prompt_closes_no_session_that_stays() -> None:
    is_there = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.hello()
        is_there.set()
        await peer.left()

    async def test() -> None:
        async with playing(script) as server:
            process = await chat(server.url, "--session", "s_1")
            await is_there.wait()
            await read_until(process, "you > ")
            told = asyncio.create_task(process.communicate())
            while not told.done():
                # One that comes just before the program waits for input is seen behind that.
                process.send_signal(signal.SIGINT)
                await asyncio.wait([told], timeout=3.0)
            assert b"kept: s_1" in told.result()[0]

    asyncio.run(test())


def test_an_interrupt_cancels_the_turn_and_not_the_program() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        turn = (await peer.receive())["turn_id"]
        await peer.send("turn.created", seq=1, turn_id=turn, position=0)
        await peer.send("turn.delta", seq=2, turn_id=turn, text="Once upon", n=2)
        cancel = await peer.receive()
        assert (cancel["type"], cancel["keep_partial"]) == ("turn.cancel", True)
        item = {"content": "Once upon"}
        await peer.send("turn.cancelled", seq=3, turn_id=turn, item=item, usage=USAGE)
        await answer(peer, 4, "Still here.")
        await peer.closed(6)

    async def test() -> None:
        async with playing(script) as server:
            process = await chat(server.url)
            assert process.stdin is not None
            process.stdin.write(b"tell me a story\n")
            await read_until(process, "Once upon")
            process.send_signal(signal.SIGINT)
            assert "cancelled" in await read_until(process, "you > ")
            assert "Still here." in await finish(process, "are you there?", "/quit")

    asyncio.run(test())


def test_a_reader_that_leaves_ends_the_program_without_a_word() -> None:
    is_asked = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.hello()
        is_asked.set()
        with contextlib.suppress(ConnectionClosed):
            await answer(peer, 1, "Hello.")
            await peer.left()

    async def test() -> None:
        read, write = os.pipe()
        async with playing(script) as server:
            process = await chat(server.url, stdout=write)
            os.close(write)
            await is_asked.wait()
            os.close(read)
            _, err = await process.communicate(b"hello\nand again\n")
            assert (process.returncode, err) == (1, b"")

    asyncio.run(test())


def test_an_interrupt_outside_of_a_turn_leaves_as_a_shell_expects() -> None:
    is_opening = asyncio.Event()

    async def first(peer: Peer) -> None:
        await peer.hello()
        await peer.closed(1)

    async def second(peer: Peer) -> None:
        is_opening.set()
        await peer.socket.wait_closed()

    async def test() -> None:
        async with playing(first, second) as server:
            process = await chat(server.url)
            assert process.stdin is not None
            process.stdin.write(b"/system be a pirate\n")
            await is_opening.wait()
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130

    asyncio.run(test())


def test_a_server_that_goes_away_is_told_and_so_is_its_return() -> None:
    may_return = asyncio.Event()
    asked: list[str] = []

    async def first(peer: Peer) -> None:
        await peer.hello()
        asked.append((await peer.receive())["turn_id"])
        peer.cut()

    async def second(peer: Peer) -> None:
        await may_return.wait()
        await peer.hello(resumed=True)
        create = await peer.receive()
        assert create["turn_id"] == asked[0]
        await peer.send("turn.delta", seq=1, turn_id=asked[0], text="Back.", n=1)
        await peer.complete(2, asked[0], "Back.")
        asked.append((await peer.receive())["turn_id"])
        peer.cut()

    async def third(peer: Peer) -> None:
        await peer.hello(resumed=True)
        create = await answer(peer, 3, "At once.")
        assert create["turn_id"] == asked[1]
        await peer.closed(5)

    async def test() -> None:
        async with playing(first, second, third) as server:
            process = await chat(server.url)
            assert process.stdin is not None
            process.stdin.write(b"are you there?\n")
            await read_until(process, "connection lost")
            may_return.set()
            shown = await read_until(process, "you > ")
            assert "connected again" in shown
            assert "Back." in shown
            shown = await finish(process, "and now?", "/exit")
            assert "At once." in shown
            # Who comes back within half a second says nothing.
            assert shown.count("connected again") == shown.count("connection lost")

    asyncio.run(test())


def test_an_answer_that_the_server_has_lost_is_told_to_begin_anew() -> None:
    asked: list[str] = []

    async def first(peer: Peer) -> None:
        asked.append(await peer.begin_and_cut("Once upon"))

    async def second(peer: Peer) -> None:
        await peer.hello(epoch="e2")
        await peer.receive()
        await peer.send("turn.created", seq=1, turn_id=asked[0], position=0)
        await peer.send("turn.delta", seq=2, turn_id=asked[0], text="Once upon a", n=3)
        await peer.complete(3, asked[0], "Once upon a")
        await peer.closed(4)

    async def test() -> None:
        async with playing(first, second) as server:
            shown = await finish(await chat(server.url), "tell me a story", "/quit")
        notice = "\n(the server had lost this answer: it begins anew)\n"
        assert f"Once upon{notice}Once upon a\n" in shown

    asyncio.run(test())


def test_a_session_that_is_gone_is_followed_by_a_new_one() -> None:
    async def first(peer: Peer) -> None:
        await peer.hello()
        await answer(peer, 1, "Aye.")
        await peer.send("session.closed", seq=3, reason="expired")

    async def second(peer: Peer) -> None:
        """The first line may have met the old session: then this one has one turn, else two."""
        await peer.hello()
        seq = 1
        while (frame := await peer.receive())["type"] == "turn.create":
            await peer.send("turn.delta", seq=seq, turn_id=frame["turn_id"], text="Again.", n=1)
            await peer.complete(seq + 1, frame["turn_id"], "Again.")
            seq += 2
        await peer.send("session.closed", seq=seq, reason="client")

    async def test() -> None:
        async with playing(first, second) as server:
            process = await chat(server.url)
            assert process.stdin is not None
            process.stdin.write(b"hello\n")
            await read_until(process, "Aye.")
            shown = await finish(process, "hello?", "once more", "/quit")
            assert "earlier turns are lost" in shown
            assert "Again." in shown

    asyncio.run(test())


def test_a_paste_ends_with_the_input_at_the_latest() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        create = await answer(peer, 1, "Noted.")
        assert create["input"] == [{"role": "user", "content": "one\ntwo"}]
        await peer.closed(3)

    async def test() -> None:
        async with playing(script) as server:
            shown = await finish(await chat(server.url), "/paste", "one", "two")
        assert "Noted." in shown

    asyncio.run(test())


def test_a_paste_of_several_lines_is_one_turn() -> None:
    pasted = "def f():\n    return 1\n\nf()"
    typed = f"\x1b[200~{pasted}\x1b[201~\r/paste\rone\rtwo\r.\r/quit\r".encode()

    async def script(peer: Peer) -> None:
        await peer.hello()
        for seq, text in ((1, pasted), (3, "one\ntwo")):
            create = await answer(peer, seq, "Noted.")
            assert create["input"] == [{"role": "user", "content": text}]
        await peer.closed(5)

    async def test() -> None:
        master, slave = pty.openpty()
        async with playing(script) as server:
            argv = [sys.executable, "-m", "session_server", "chat", "--url", server.url]
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=slave, stdout=slave, stderr=slave
            )
            os.close(slave)
            shown = await asyncio.to_thread(read_tty, master, b"you > ")
            os.write(master, typed)
            shown += await asyncio.to_thread(read_tty, master, None)
            assert await process.wait() == 0, shown
        os.close(master)
        assert shown.count(b"Noted.") == 2

    asyncio.run(test())


def read_tty(master: int, needle: bytes | None) -> bytes:
    """What a terminal shows up to `needle`, or to the end."""
    seen = b""
    while needle is None or needle not in seen:
        try:
            piece = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        seen += piece
    return seen


def test_a_server_that_is_not_there_is_an_error_and_not_a_traceback() -> None:
    async def test() -> None:
        async with playing() as server:
            url = server.url
        process = await chat(url)
        out, err = await process.communicate(b"")
        assert process.returncode == 1
        assert b"no connection" in out
        assert b"is a server running there?" in out
        assert b"Traceback" not in err

    asyncio.run(test())


@pytest.mark.parametrize(
    ("scheme", "said", "advice"),
    [
        ("http", b"\x15\x03\x03\x00\x02\x02\x32", b"behind TLS it is at an https:// address"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"without TLS it is at an http:// address"),
    ],
)
def test_a_server_that_speaks_something_else_may_be_at_the_other_scheme(
    scheme: str, said: bytes, advice: bytes
) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            process = await chat(f"{scheme}://127.0.0.1:{port}")
            out, _ = await process.communicate(b"")
        assert process.returncode == 1
        assert b"is a server running there? " + advice in out

    asyncio.run(test())


def test_a_server_that_asks_for_a_key_is_an_error_that_names_the_flag() -> None:
    async def script(peer: Peer) -> None:
        await peer.send("error", error={"code": "unauthorized", "message": "A key is required."})

    async def test() -> None:
        async with playing(script) as server:
            process = await chat(server.url)
            out, err = await process.communicate(b"")
        assert (process.returncode, err) == (1, b"")
        assert b"A key is required." in out
        assert b"pass --api-key" in out

    asyncio.run(test())
