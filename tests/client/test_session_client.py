"""The client against a scripted server: every promise of its docstrings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from websockets.http11 import Response

from session_server.client import (
    BadAddress,
    ClientOptions,
    ConnectionLost,
    Refused,
    TurnPrefill,
    TurnReplaced,
    TurnText,
    connect,
    server_address,
)
from session_server.client.address import socket_address
from session_server.core.session_events import (
    ChatInput,
    Message,
    TextInput,
    TokenInput,
    ToolCall,
)
from tests.client.scripted_server import Peer, denial, playing

QUICK = ClientOptions(first_delay_s=0.001, longest_delay_s=0.01, max_attempts=5)
QUICK_TO_LEAVE = replace(QUICK, longest_wait_s=1)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Each test is one coroutine on a loop of its own."""
    asyncio.run(_as_coroutine(test))


async def _as_coroutine(test: Callable[[], Awaitable[None]]) -> None:
    await test()


def test_a_turn_streams_its_text_and_ends_with_its_cost() -> None:
    async def script(peer: Peer) -> None:
        assert peer.path == "/v1/sessions/new/ws"
        await peer.hello()
        create = await peer.receive()
        assert create["input"] == [{"role": "user", "content": "hi"}]
        assert create["sampling"] == {"temperature": 0}
        turn = create["turn_id"]
        await peer.send("turn.created", seq=1, turn_id=turn, position=0)
        await peer.send("turn.progress", seq=2, turn_id=turn, processed=5, cached=3, total=10)
        await peer.send("turn.delta", seq=3, turn_id=turn, text="Hel", n=1)
        await peer.send("turn.delta", seq=4, turn_id=turn, text="lo", n=1)
        await peer.complete(5, turn, "Hello")
        await peer.closed(6)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            turn = await session.start("hi", sampling={"temperature": 0})
            events = [event async for event in turn]
            result = await turn.result()
        assert events[0] == TurnPrefill(5, 3, 10)
        assert [e.text for e in events if isinstance(e, TurnText)] == ["Hel", "lo"]
        assert (result.status, result.text, result.finish_reason) == ("completed", "Hello", "stop")
        assert (result.usage.input_tokens, result.usage.cached_tokens) == (10, 7)
        assert result.timings.ttft_ms == 1.5

    run(test)


def test_a_lost_socket_is_replaced_and_nothing_is_missed_or_doubled() -> None:
    turns: list[str] = []

    async def first(peer: Peer) -> None:
        turns.append(await peer.begin_and_cut("one "))

    async def second(peer: Peer) -> None:
        assert peer.path == "/v1/sessions/s_1/ws?after=2&epoch=e1"
        await peer.hello(2, resumed=True)
        await peer.send("turn.delta", seq=2, turn_id=turns[0], text="one ", n=1)
        await peer.send("turn.delta", seq=3, turn_id=turns[0], text="two", n=1)
        await peer.complete(4, turns[0], "one two")
        await peer.closed(5)

    async def test() -> None:
        async with (
            playing(first, second) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            turn = await session.start("count")
            pieces = [e.text async for e in turn if isinstance(e, TurnText)]
            assert (await turn.result()).text == "one two"
            assert session.num_reconnects == 1
        assert pieces == ["one ", "two"]

    run(test)


def cut_at_a_turn(turns: list[str]) -> Callable[[Peer], Awaitable[None]]:
    """A server whose line is cut when a turn comes, whose id it notes."""

    async def script(peer: Peer) -> None:
        await peer.hello()
        turns.append((await peer.receive())["turn_id"])
        peer.cut()

    return script


def test_a_turn_the_server_may_not_have_heard_is_sent_again_under_its_id() -> None:
    turns: list[str] = []

    async def second(peer: Peer) -> None:
        await peer.hello(0, resumed=True)
        assert (await peer.receive())["turn_id"] == turns[0]
        await peer.complete(1, turns[0], "yes")
        await peer.closed(2)

    async def test() -> None:
        async with (
            playing(cut_at_a_turn(turns), second) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            assert (await session.ask("are you there?")).text == "yes"

    run(test)


MOVED = {"code": "session_moved", "message": "ask again", "type": "invalid_request_error"}


def test_a_turn_whose_session_has_moved_goes_on_in_another_replica() -> None:
    turns: list[str] = []

    async def first(peer: Peer) -> None:
        await peer.hello()
        turns.append((await peer.receive())["turn_id"])
        await peer.send("turn.created", seq=1, turn_id=turns[0], position=0)
        await peer.send("turn.delta", seq=2, turn_id=turns[0], text="half of it", n=2)
        failure = {"error": MOVED, "retryable": True, "usage": {}}
        await peer.send("turn.failed", seq=3, turn_id=turns[0], **failure)
        await peer.socket.close(1012)

    async def elsewhere(peer: Peer) -> None:
        await peer.hello(1000, epoch="e2")  # its journal is another one
        assert (await peer.receive())["turn_id"] == turns[0]
        await peer.send("turn.created", seq=1001, turn_id=turns[0], position=0)
        await peer.send("turn.delta", seq=1002, turn_id=turns[0], text="all", n=1)
        await peer.complete(1003, turns[0], "all", durable=True)
        await peer.closed(1004)

    async def test() -> None:
        refusal = denial(409, MOVED | {"retryable": True})
        async with (
            playing(first, refusal) as one,
            playing(elsewhere) as other,
            await connect([one.url, other.url], options=QUICK) as session,
        ):
            turn = await session.start("count")
            result = await turn.result()
            assert (result.text, result.is_durable) == ("all", True)
            assert turn.text == "all"
            assert session.num_reconnects == 1

    run(test)


def test_a_replica_that_does_not_answer_is_passed_over() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.complete(1, (await peer.receive())["turn_id"], "yes")
        await peer.closed(2)

    async def test() -> None:
        async with playing(script) as server:
            urls = ["http://127.0.0.1:9", server.url]
            async with await connect(urls, options=QUICK) as session:
                assert (await session.ask("are you there?")).text == "yes"

    run(test)


def test_a_turn_that_failed_while_nobody_was_connected_is_asked_for_until_it_runs() -> None:
    """It was sent again before its failure was told: the server may have begun it anew."""
    turns: list[str] = []

    async def second(peer: Peer) -> None:
        await peer.hello(0, resumed=True)
        assert (await peer.receive())["turn_id"] == turns[0]
        error = {"type": "server_error", "code": "engine_restarting", "message": "m"}
        failure = {"turn_id": turns[0], "error": error, "retryable": True, "usage": {}}
        await peer.send("turn.created", seq=1, turn_id=turns[0], position=0)
        await peer.send("turn.failed", seq=2, **failure)
        assert (await peer.receive())["turn_id"] == turns[0]
        await peer.send("turn.created", seq=3, turn_id=turns[0], position=0)
        await peer.complete(4, turns[0], "yes")
        await peer.closed(5)

    async def test() -> None:
        async with (
            playing(cut_at_a_turn(turns), second) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            assert (await session.ask("are you there?")).text == "yes"

    run(test)


def test_a_cancel_survives_the_loss_of_the_socket() -> None:
    turns: list[str] = []

    async def first(peer: Peer) -> None:
        await peer.hello()
        turns.append((await peer.receive())["turn_id"])
        await peer.send("turn.created", seq=1, turn_id=turns[0], position=0)
        await peer.receive()
        peer.cut()

    async def second(peer: Peer) -> None:
        await peer.hello(1, resumed=True)
        again = await peer.receive()
        assert (again["type"], again["keep_partial"]) == ("turn.cancel", False)
        await peer.send(
            "turn.cancelled",
            seq=2,
            turn_id=turns[0],
            kept_partial=False,
            item={"content": ""},
            usage={},
        )
        await peer.closed(3)

    async def test() -> None:
        async with (
            playing(first, second) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            turn = await session.start("a long story")
            await turn.cancel(keep_partial=False)
            assert (await turn.result()).status == "cancelled"

    run(test)


def test_a_lost_journal_replaces_the_text_of_the_running_turn() -> None:
    turns: list[str] = []

    async def first(peer: Peer) -> None:
        turns.append(await peer.begin_and_cut("stale"))

    async def second(peer: Peer) -> None:
        await peer.hello(90, epoch="e2")
        await peer.send("session.resume_failed", reason="epoch_changed")
        await peer.send("session.snapshot", seq=90, turn={"turn_id": turns[0], "text": "fresh "})
        assert (await peer.receive())["turn_id"] == turns[0], "sent again after a lost journal"
        await peer.send("turn.delta", seq=91, turn_id=turns[0], text="start", n=1)
        await peer.complete(92, turns[0], "fresh start")
        await peer.closed(93)

    async def test() -> None:
        async with (
            playing(first, second) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            turn = await session.start("go")
            events = [event async for event in turn]
            assert TurnReplaced("fresh ") in events
            assert turn.text == "fresh start"

    run(test)


def test_an_answer_that_the_server_has_lost_begins_anew() -> None:
    turns: list[str] = []

    async def first(peer: Peer) -> None:
        turns.append(await peer.begin_and_cut("one "))

    async def second(peer: Peer) -> None:
        """The server was killed: of the turn it knows nothing."""
        await peer.hello(0, epoch="e2")
        await peer.send("session.resume_failed", reason="epoch_changed")
        await peer.send("session.snapshot", seq=0, turn=None)
        assert (await peer.receive())["turn_id"] == turns[0]
        await peer.send("turn.created", seq=1, turn_id=turns[0], position=0)
        assert (await peer.receive())["turn_id"] == turns[0], "sent again behind the snapshot"
        await peer.send("turn.created", turn_id=turns[0], position=0)
        await peer.send("turn.delta", seq=2, turn_id=turns[0], text="one two", n=2)
        await peer.complete(3, turns[0], "one two")
        await peer.closed(4)

    async def test() -> None:
        async with (
            playing(first, second) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            turn = await session.start("count")
            events = [e async for e in turn if not isinstance(e, TurnText)]
            assert events == [TurnReplaced("")]
            assert turn.text == "one two"

    run(test)


def test_tools_calls_and_thoughts_are_sent_and_received() -> None:
    call = {"id": "abc", "name": "weather", "arguments": '{"city": "Oslo"}'}
    tool = {"type": "function", "function": {"name": "weather"}}

    async def script(peer: Peer) -> None:
        await peer.hello()
        create = await peer.receive()
        assert create["tools"] == [tool]
        assert create["input"] == [
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": "So."},
            {"role": "tool", "content": "Rain.", "tool_call_id": "abc"},
        ]
        turn_id = create["turn_id"]
        piece = call | {"index": 0, "arguments": '{"city"'}
        rest = {"index": 0, "arguments": ': "Oslo"}'}
        more = {"turn_id": turn_id, "text": "", "n": 1}
        await peer.send("turn.delta", seq=1, **more, reasoning="Hm.", tool_calls=[piece])
        await peer.send("turn.delta", seq=2, **more, tool_calls=[rest])
        await peer.complete(3, turn_id, "", reasoning="Hm.", tool_calls=[call])
        await peer.closed(4)

    async def test() -> None:
        async with (
            playing(script) as server,
            await connect(server.url, options=QUICK) as session,
        ):
            calls = (ToolCall(**call),)
            said = Message("assistant", "", tool_calls=calls, reasoning="So.")
            result = Message("tool", "Rain.", tool_call_id="abc")
            asked = ChatInput((said, result), tools=(json.dumps(tool),))
            turn = await session.start(asked)
            events = [event async for event in turn if isinstance(event, TurnText)]
            assert [event.reasoning for event in events] == ["Hm.", ""]
            pieces = [piece for event in events for piece in event.tool_calls]
            assert (pieces[0].id, pieces[0].name, pieces[1].id) == ("abc", "weather", "")
            end = await turn.result()
            assert (end.text, end.reasoning, end.tool_calls) == ("", "Hm.", calls)

    run(test)


def test_a_refused_turn_raises_its_code_and_the_session_goes_on() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        turn = (await peer.receive())["turn_id"]
        error = {"type": "x", "code": "quota_exceeded", "message": "wait", "turn_id": turn}
        await peer.send("error", error=error | {"retry_after_s": 7})
        await peer.complete(1, (await peer.receive())["turn_id"], "now")
        await peer.closed(2)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            with pytest.raises(Refused, match="quota_exceeded: wait") as refused:
                await session.ask("first")
            assert refused.value.retry_after_s == 7
            assert (await session.ask("second")).text == "now"

    run(test)


def test_a_refused_draft_raises_its_code_for_whoever_waits_for_it() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        for answer in ("error", "turn.drafted"):
            draft_id = (await peer.receive())["draft_id"]
            error = {"code": "quota_exceeded", "turn_id": draft_id, "retry_after_s": 9}
            counts = {"processed": 3, "kept": 0, "total": 3}
            await peer.send(answer, error=error, draft_id=draft_id, **counts)
        await peer.closed(1)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            draft_id = await session.draft("Where is")
            with pytest.raises(Refused, match="quota_exceeded") as refused:
                await asyncio.wait_for(session.drafted(draft_id), 2)
            assert refused.value.retry_after_s == 9
            assert (await session.drafted(await session.draft("Where is my"))).processed == 3

    run(test)


def test_a_failed_turn_is_a_result_with_an_error() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        turn = (await peer.receive())["turn_id"]
        error = {"code": "quota_exceeded", "message": "again, please", "retry_after_s": 30}
        await peer.send("turn.failed", seq=1, turn_id=turn, error=error, usage={}, retryable=True)
        await peer.closed(2)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            result = await session.ask("hello")
            assert result.status == "failed"
            assert result.error is not None
            assert (result.error.code, result.error.retry_after_s) == ("quota_exceeded", 30)

    run(test)


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        (ChatInput((Message("system", "be brief"),)), {"input": [{"role": "system"}]}),
        (TextInput("raw"), {"text": "raw"}),
        (TokenInput((1, 2)), {"input_ids": [1, 2]}),
    ],
)
def test_every_kind_of_input_has_its_field(content: ChatInput, fields: dict[str, object]) -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        create = await peer.receive()
        assert set(fields) == set(create) & {"input", "text", "input_ids"}
        await peer.complete(1, create["turn_id"], "")
        await peer.closed(2)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            await session.ask(content)

    run(test)


def test_a_final_close_fails_live_turns_and_is_not_retried() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.receive()
        await peer.socket.close(4409, "superseded")

    async def test() -> None:
        async with playing(script) as server:
            async with await connect(server.url, options=QUICK) as session:
                with pytest.raises(ConnectionLost, match="4409"):
                    await session.ask("hello")
            assert server.num_connections == 1

    run(test)


def test_a_session_that_does_not_exist_is_refused_at_once() -> None:
    async def script(peer: Peer) -> None:
        error = {"code": "session_not_found", "message": "No such session."}
        await peer.send("error", error=error)
        await peer.socket.close(4404)

    async def test() -> None:
        async with playing(script) as server:
            with pytest.raises(Refused, match="session_not_found"):
                await connect(server.url, session_id="s_9", options=QUICK)

    run(test)


def test_a_message_to_a_session_that_its_server_forgot_fails_with_the_servers_words() -> None:
    async def first(peer: Peer) -> None:
        await peer.hello()
        peer.cut()

    async def second(peer: Peer) -> None:
        error = {"code": "session_not_found", "message": "No such session."}
        await peer.send("error", error=error)
        await peer.socket.close(4404)

    async def test() -> None:
        async with playing(first, second) as server:
            session = await connect(server.url, options=QUICK)
            for _ in range(2):  # while it comes back, and when it is over
                with pytest.raises(Refused, match="session_not_found"):
                    await session.ask("hello")
            assert session.is_over
            await session.close()  # there is nothing left to close

    run(test)


OVER = {"code": "quota_exceeded", "message": "you would hold 2 sessions", "retry_after_s": 1}


@pytest.mark.parametrize(
    "first", [denial(429, OVER, Retry_After="1"), denial(503, Retry_After="1")]
)
def test_a_server_that_says_when_is_tried_again_then(first: Response) -> None:
    async def second(peer: Peer) -> None:
        await peer.hello()
        await peer.closed(1)

    async def test() -> None:
        now_s = asyncio.get_running_loop().time
        async with playing(first, second) as server:
            began_s = now_s()
            async with await connect(server.url, options=QUICK_TO_LEAVE):
                assert now_s() - began_s >= 1

    run(test)


@pytest.mark.parametrize(
    ("refusal", "options", "told", "retry_after_s"),
    [
        (denial(429, OVER, Retry_After="2"), QUICK_TO_LEAVE, "quota_exceeded: you would", 1),
        (denial(503, {"code": "server_busy"}, Retry_After="2"), QUICK_TO_LEAVE, "server_busy", 2),
        (denial(503, {"code": "server_busy"}), replace(QUICK, first_attempts=1), "server_b", None),
        (denial(401, {"code": "unauthorized"}, Retry_After="x"), QUICK, "unauthorized", None),
    ],
)
def test_a_server_that_refuses_for_long_or_for_good_is_left_with_what_it_said(
    refusal: Response, options: ClientOptions, told: str, retry_after_s: int | None
) -> None:
    async def test() -> None:
        async with playing(refusal) as server:
            with pytest.raises(Refused, match=told) as refused:
                await connect(server.url, options=options)
            assert refused.value.retry_after_s == retry_after_s
            assert server.num_connections == 1

    run(test)


def test_a_dead_address_is_given_up_after_the_attempts_allowed() -> None:
    async def test() -> None:
        async with playing() as server:
            url = server.url
        with pytest.raises(ConnectionLost, match="after 3 attempts"):
            await connect(url, options=QUICK)

    run(test)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:30000",
        "localhost",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:0",
        "http://h?a=1",
        "",
    ],
)
def test_what_is_no_address_is_refused_before_any_attempt(url: str) -> None:
    with pytest.raises(BadAddress, match="http://HOST:PORT"):
        asyncio.run(connect(url))


@pytest.mark.parametrize(
    ("text", "http", "ws"),
    [
        ("http://h:1/", "http://h:1", "ws://h:1"),
        ("HTTPS://h", "https://h", "wss://h"),
        ("ws://[::1]:1", "http://[::1]:1", "ws://[::1]:1"),
        ("wss://h/behind/", "https://h/behind", "wss://h/behind"),
        ("http://h:1/v1", "http://h:1", "ws://h:1"),
        ("http://h:1/v1/", "http://h:1", "ws://h:1"),
        ("http://h/behind/v1", "http://h/behind", "ws://h/behind"),
    ],
)
def test_an_address_serves_routes_and_sockets(text: str, http: str, ws: str) -> None:
    assert (server_address(text), socket_address(text)) == (http, ws)


def test_leaving_keeps_the_session_and_fails_what_was_awaited() -> None:
    async def script(peer: Peer) -> None:
        await peer.hello()
        await peer.receive()
        await peer.socket.wait_closed()

    async def test() -> None:
        async with playing(script) as server:
            session = await connect(server.url)
            turn = await session.start("hello")
            await session.leave()
            with pytest.raises(ConnectionLost, match="left"):
                await turn.result()

    run(test)


def test_events_beyond_the_buffer_are_merged_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("session_server.client.turn.MAX_BUFFERED_EVENTS", 3)

    async def script(peer: Peer) -> None:
        await peer.hello()
        turn = (await peer.receive())["turn_id"]
        for seq, letter in enumerate("abcdefgh", start=1):
            await peer.send("turn.delta", seq=seq, turn_id=turn, text=letter, n=1)
        await peer.complete(9, turn, "abcdefgh")
        await peer.closed(10)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            turn = await session.start("alphabet")
            await turn.result()
            pieces = [e async for e in turn if isinstance(e, TurnText)]
            assert "".join(p.text for p in pieces) == "abcdefgh"
            assert sum(p.num_tokens for p in pieces) == 8
            assert len(pieces) == 3

    run(test)


def test_a_reader_overtaken_by_the_journal_asks_again_how_its_turns_ended() -> None:
    """A turn that ended in the part that was lost would be waited for without end."""

    async def script(peer: Peer) -> None:
        await peer.hello()
        create = await peer.receive()
        await peer.send("turn.created", seq=1, turn_id=create["turn_id"], position=0)
        await peer.send("session.resume_failed", reason="offset_lost")
        await peer.send("session.snapshot", seq=900, items=[], turn=None, queued=[])
        assert await peer.receive() == create
        await peer.complete(901, create["turn_id"], "Hello")
        await peer.closed(902)

    async def test() -> None:
        async with playing(script) as server, await connect(server.url) as session:
            assert (await session.ask("hi")).text == "Hello"

    run(test)


def test_a_close_that_may_not_have_been_heard_is_said_again() -> None:
    """Otherwise the session stays open at the server until its time to live is over."""

    async def first(peer: Peer) -> None:
        await peer.hello()
        assert (await peer.receive())["type"] == "session.close"
        peer.cut()

    is_heard = asyncio.Event()

    async def second(peer: Peer) -> None:
        await peer.hello(resumed=True)
        await peer.closed(1)
        is_heard.set()

    async def test() -> None:
        async with playing(first, second) as server:
            session = await connect(server.url, options=QUICK)
            await session.close()
            assert is_heard.is_set()

    run(test)
