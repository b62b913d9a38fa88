"""`kvsession.v1` over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.streams import StreamReader

from session_server.core.commands import WarmSession
from session_server.core.owner import ANONYMOUS
from session_server.protocol import frame_queue
from session_server.protocol.session_protocol import SessionProtocol
from session_server.web.keys import KeyRing
from session_server.web.socket_peer import SocketPeer
from session_server.web.websocket_guard import GuardedWebSocket, _head
from tests.web.realtime_client import realtime
from tests.web.serving import SUBPROTOCOL, Served, served, serving, small_journal, turn
from tests.web.wire_client import Wire, narrow_socket

KEYS = KeyRing.of("secret", "other")

BAD_FRAMES = [
    "{",
    "null",
    "[" * 100_000,
    '{"type":"nothing"}',
    '{"type":1}',
    "{}",
    '{"type":"ack","seq":' + "9" * 40 + "}",
    '{"type":"ping","t":NaN}',
    '{"type":"turn.create","text":"\\ud800"}',
    '{"type":"turn.create","turn_id":"t","text":"a","sampling":{"temperature":"0"}}',
    '{"type":"turn.create","turn_id":"t"}',
    '{"type":"turn.create","turn_id":"t","text":"a","x":' + "[" * 50_000 + "]" * 50_000 + "}",
    '{"type":"turn.cancel","turn_id":"nobody"}',
    '{"type":"session.update","ttl_s":0}',
]


@served()
async def test_the_hello_says_where_we_stand_and_what_is_allowed(this: Served) -> None:
    async with this.socket() as wire:
        assert wire.socket.subprotocol == "kvsession.v1"
        assert wire.hello["type"] == "session.opened"
        assert (wire.hello["seq"], wire.hello["resumed"], wire.hello["tokens"]) == (0, False, 0)
        assert wire.hello["limits"]["max_context"] == 4096
        assert wire.hello["limits"]["max_message_bytes"] == 1 << 20


@served()
async def test_tokens_are_sent_without_a_change_of_tasks(this: Served) -> None:
    """What is not is sent by the writer: the first frames, the last, and any behind them."""
    with mock.patch.object(SocketPeer, "flush", autospec=True, side_effect=SocketPeer.flush) as led:
        async with this.socket() as wire:
            end = await wire.turn("t1", input_ids=[7, 8], sampling={"max_tokens": 200})
            deltas = [frame for frame in wire.frames if frame["type"] == "turn.delta"]
            assert sum(delta["n"] for delta in deltas) == end["usage"]["output_tokens"] == 200
    assert led.call_count < len(deltas) / 2


@served()
async def test_a_turn_goes_from_created_over_deltas_to_completed(this: Served) -> None:
    async with this.socket() as wire:
        end = await wire.turn("t1", input_ids=[7, 8])
        kinds = [frame["type"] for frame in wire.frames]
        assert kinds[:2] == ["session.opened", "turn.created"]
        assert end["usage"]["total_tokens"] == 6
        deltas = [frame for frame in wire.frames if frame["type"] == "turn.delta"]
        assert "".join(delta["text"] for delta in deltas) == end["item"]["content"]
        assert sum(delta["n"] for delta in deltas) == 4
        seqs = [frame["seq"] for frame in wire.frames]
        assert seqs == sorted(seqs)


@served()
async def test_a_socket_to_no_route_is_a_404_in_the_one_form_of_errors(this: Served) -> None:
    for path in ("/", "/v1/sessions", "/v1/sessions/new", "/v1/sessions/new/ws/more"):
        with pytest.raises(InvalidStatus) as refused:
            async with connect(this.url.replace("http", "ws", 1) + path, proxy=None):
                pass
        assert refused.value.response.status_code == 404
        assert json.loads(refused.value.response.body or b"")["error"]["code"] == "not_found"


@served()
async def test_a_cancel_when_nothing_runs_says_so(this: Served) -> None:
    async with this.socket() as wire:
        await wire.send("turn.cancel")
        error = (await wire.until("error"))["error"]
        assert (error["code"], error["message"]) == (
            "turn_not_active",
            "no turn of this session runs",
        )


@served()
async def test_turns_sent_ahead_wait_in_line_and_refusals_do_not_disturb_them(
    this: Served,
) -> None:
    this.is_held = True
    async with this.socket() as wire:
        for index in range(5):
            await wire.send("turn.create", turn_id=f"t{index}", **turn(input_ids=[7]))
            created = await wire.until("turn.created")
            assert created["position"] == index
        await wire.send("turn.create", turn_id="t5", **turn(input_ids=[7]))
        refused = await wire.until("error")
        assert (refused["error"]["code"], refused["error"]["turn_id"]) == ("session_busy", "t5")
        this.is_held = False
        for index in range(5):
            assert (await wire.until("turn.completed"))["turn_id"] == f"t{index}"


@served()
async def test_a_turn_submitted_twice_is_answered_and_run_once(this: Served) -> None:
    async with this.socket() as wire:
        first = await wire.turn("t1")
        again = await wire.turn("t1")
        assert "seq" not in again
        assert again["item"] == first["item"]
        conflict = await wire.turn("t1", text="Bye")
        assert conflict["error"]["code"] == "turn_conflict"
        assert this.sessions.get(ANONYMOUS, wire.hello["session_id"]).num_turns == 1


@served()
async def test_a_cancel_without_an_id_ends_the_running_turn(this: Served) -> None:
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t1", **turn(input_ids=[7], max_tokens=4000))
        await wire.until("turn.delta")
        await wire.send("turn.cancel", keep_partial=True)
        end = await wire.until("turn.cancelled")
        assert (end["kept_partial"], end["reason"]) == (True, "client_cancelled")
        kept = end["usage"]["total_tokens"]
        assert (await wire.turn("t2", input_ids=[7]))["usage"]["input_tokens"] == kept + 1


@served()
async def test_what_was_said_can_be_changed_and_gone_on_from(this: Served) -> None:
    async with this.socket() as wire:
        hello = [{"role": "user", "content": "Hello"}]
        first = await wire.turn("t1", input=hello)
        second = await wire.turn("t2", input=[{"role": "user", "content": "And?"}])
        await wire.send("session.rewind", to_item=first["item"]["id"])
        rewound = await wire.until("session.rewound")
        assert rewound["to_item"] == first["item"]["id"]
        assert rewound["tokens"] == first["usage"]["total_tokens"]
        assert rewound["kept_tokens"] in (rewound["tokens"], rewound["tokens"] - 1)
        await wire.send("session.fork", id="other")
        assert (await wire.until("session.forked"))["session_id"] == "other"
        again = await wire.turn("t3", input=[{"role": "user", "content": "And?"}])
        assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        items = (await this.http.get(f"/v1/sessions/{wire.hello['session_id']}/items")).json()
        question = items["data"][2]
        await wire.send("item.edit", item_id=question["id"], content="Or?")
        assert (await wire.until("item.edited"))["item_id"] == question["id"]
        edited = await wire.turn("t4", input=[])
        assert edited["usage"]["cached_tokens"] >= first["usage"]["total_tokens"] - 1
        for kind, fields, code in (
            ("session.rewind", {"to_item": "i_99"}, "item_not_found"),
            ("session.fork", {"id": "other"}, "session_exists"),
            ("item.edit", {"item_id": "i_99", "content": "x"}, "item_not_found"),
        ):
            await wire.send(kind, **fields)
            assert (await wire.until("error"))["error"]["code"] == code
    forked = (await this.http.get("/v1/sessions/other/items")).json()["data"]
    assert [item["role"] for item in forked] == ["user", "assistant"]


@served()
async def test_a_session_gives_its_kv_back_and_is_pinned(this: Served) -> None:
    async with this.socket() as wire:
        path = f"/v1/sessions/{wire.hello['session_id']}"
        first = await wire.turn("t1", input="Hello")
        await wire.send("session.cool")
        state = await wire.until("session.state")
        assert (state["state"], state["reason"]) == ("cold", "client")
        again = await wire.turn("t2", input="And?")
        assert again["usage"]["input_tokens"] > first["usage"]["total_tokens"]
        await wire.send("session.update", pinned=True)
        assert (await wire.until("session.updated"))["pinned"]
        assert (await this.http.patch(path, json={"pinned": False})).json()["pinned"] is False
        assert (await this.http.post(f"{path}/cool")).json()["state"] == "cold"
        this.is_held = True
        await wire.send("turn.create", turn_id="t3", input="Hello")
        await wire.until("turn.created")
        for kind, fields in (("session.cool", {}), ("session.update", {"pinned": True})):
            await wire.send(kind, **fields)
            assert (await wire.until("error"))["error"]["code"] == "session_busy"
        this.is_held = False


@served()
async def test_a_session_at_rest_is_warmed_when_asked_and_by_whoever_attaches(this: Served) -> None:
    def num_warmed() -> int:
        return len([c for c in this.engine.seen if isinstance(c, WarmSession)])

    session_id = await this.open()
    path = f"/v1/sessions/{session_id}"
    body = {"input": "Hello", "sampling": {"max_tokens": 2}}
    assert (await this.http.post(f"{path}/turns", json=body)).is_success
    this.engine.kv_tiers = "disk"  # host memory would have ended with the engine
    this.engine.die()
    this.engine.come_up()
    await this.until(lambda: this.engine.is_up)
    async with this.socket(session_id) as wire:
        assert (wire.hello["state"], num_warmed()) == ("cold", 1)
        await wire.send("session.warm")
        await this.until(lambda: num_warmed() == 2)
    assert (await this.http.post(f"{path}/warm")).json()["state"] == "cold"
    async with this.http.stream("GET", f"{path}/events"):
        assert num_warmed() == 4
    async with realtime(this.url, f"?session_id={session_id}"):
        assert num_warmed() == 5
    warmed = [c.session_id for c in this.engine.seen if isinstance(c, WarmSession)]
    assert warmed == [next(iter(this.engine.slots))] * 5
    async with this.socket(session_id) as wire:
        assert (await wire.turn("t2", input="And?"))["type"] == "turn.completed"
        await wire.send("session.warm")  # it is resident
        await wire.send("ping")
        await wire.until("pong")
        assert not [frame for frame in wire.frames if frame["type"] == "error"]
    assert num_warmed() == 6
    unknown = await this.http.post("/v1/sessions/none/warm")
    assert unknown.json()["error"]["code"] == "session_not_found"


@served()
async def test_settings_pings_and_acks(this: Served) -> None:
    async with this.socket() as wire:
        await wire.send("session.update", ttl_s=77, metadata={"a": "b"})
        updated = await wire.until("session.updated")
        assert (updated["ttl_s"], updated["metadata"]) == (77, {"a": "b"})
        await wire.send("ack", seq=updated["seq"])
        await wire.send("ping", t=5)
        pong = await wire.until("pong")
        assert pong["t"] == 5
        assert pong["server_time"] > 1e9
        assert not [frame for frame in wire.frames if frame["type"] == "error"]


@served()
async def test_entries_written_together_leave_in_one_write(this: Served) -> None:
    """Whatever their lengths: those of all three forms of a frame's head."""
    sent: list[list[bytes]] = []

    def note(connection: GuardedWebSocket, texts: list[bytes]) -> None:
        sent.append(texts)
        send_texts(connection, texts)

    send_texts = GuardedWebSocket.send_texts
    async with this.socket() as wire:
        session_id = wire.hello["session_id"]
        with mock.patch.object(GuardedWebSocket, "send_texts", note):
            for size in (1, 100, 500):
                this.sessions.update(ANONYMOUS, session_id, metadata={"a": "b" * size})
            frames = [await wire.until("session.updated") for _ in range(3)]
        assert [len(frame["metadata"]["a"]) for frame in frames] == [1, 100, 500]
        assert [len(texts) for texts in sent] == [3]


@pytest.mark.parametrize("size", [0, 125, 126, 65_535, 65_536])
def test_a_text_frame_is_what_the_parser_of_websockets_takes(size: int) -> None:
    text = b"a" * size
    reader = StreamReader()
    reader.feed_data(_head(text) + text)
    parsed = Frame.parse(reader.read_exact, mask=False)
    frame = next(iter(_run_parser(parsed)))
    assert (frame.opcode, frame.data, frame.fin) == (Opcode.TEXT, text, True)


def _run_parser(parsed: Generator[None, None, Frame]) -> Iterator[Frame]:
    """Yield what a parser that has all its bytes returns."""
    yield (yield from parsed)  # type: ignore[misc]


@served()
async def test_closing_ends_the_journal_and_the_connection(this: Served) -> None:
    async with this.socket() as wire:
        await wire.send("turn.create", turn_id="t1", **turn(max_tokens=4000))
        await wire.until("turn.delta")
        await wire.send("session.close")
        assert await wire.close_code() == 4410
        kinds = [frame["type"] for frame in wire.frames]
        assert kinds[-2:] == ["turn.cancelled", "session.closed"]


@served()
async def test_frames_that_are_wrong_are_answered_and_the_connection_lives(this: Served) -> None:
    async with this.socket() as wire:
        for frame in BAD_FRAMES:
            await wire.socket.send(frame)
            answer = await wire.receive()
            assert answer["type"] == "error", frame[:80]
            assert set(answer["error"]) >= {"type", "code", "message", "param"}
        assert (await wire.turn("t1"))["type"] == "turn.completed"


@pytest.mark.parametrize(
    ("payload", "opcode", "code"),
    [
        (b"\x00\x01", Opcode.BINARY, 1003),
        (b'{"type":"ping"} \xff', Opcode.TEXT, 1007),
        (b" " * 5000, Opcode.TEXT, 1009),
    ],
)
def test_what_is_no_text_message_closes_the_connection(
    payload: bytes, opcode: Opcode, code: int
) -> None:
    @served(max_message_bytes=4096)
    async def test(this: Served) -> None:
        async with this.socket() as wire:
            await wire.socket.send(payload, text=opcode is Opcode.TEXT)
            assert await wire.close_code() == code

    test()


@served()
async def test_a_lost_connection_resumes_where_it_stopped(this: Served) -> None:
    async with this.socket() as wire:
        session_id, epoch = wire.hello["session_id"], wire.hello["epoch"]
        await wire.send("turn.create", turn_id="t1", **turn(input_ids=[7], max_tokens=40))
        first = await wire.until("turn.delta")
        wire.socket.transport.abort()
    query = f"?after={first['seq']}&epoch={epoch}"
    async with this.socket(session_id, query) as wire:
        assert wire.hello["resumed"] is True
        assert wire.hello["seq"] == first["seq"]
        end = await wire.until("turn.completed")
        rest = "".join(f["text"] for f in wire.frames if f["type"] == "turn.delta")
        assert first["text"] + rest == end["item"]["content"]
        assert all(frame["seq"] > first["seq"] for frame in wire.frames[1:])


@pytest.mark.parametrize(
    ("query", "reason"),
    [("?after=1&epoch=other", "epoch_changed"), ("?after=99999", "offset_lost")],
)
def test_what_cannot_be_replayed_is_replaced_by_a_snapshot(query: str, reason: str) -> None:
    @served()
    async def test(this: Served) -> None:
        session_id = await this.open()
        await this.http.post(f"/v1/sessions/{session_id}/turns", json=turn(input_ids=[7]))
        async with this.socket(session_id, query) as wire:
            assert wire.hello["resumed"] is False
            assert (await wire.receive())["reason"] == reason
            snapshot = await wire.receive()
            assert (snapshot["type"], snapshot["tokens"]) == ("session.snapshot", 5)
            assert snapshot["turn"] is None
            assert (await wire.turn("t2"))["type"] == "turn.completed"

    test()


@served()
async def test_the_newest_connection_takes_the_session_over(this: Served) -> None:
    async with this.socket() as old:
        await old.send("turn.create", turn_id="t1", **turn(max_tokens=200))
        await old.until("turn.delta")
        query = f"?after=0&epoch={old.hello['epoch']}"
        async with this.socket(old.hello["session_id"], query) as new:
            assert await old.close_code() == 4409
            assert (await new.until("turn.completed"))["turn_id"] == "t1"


@served()
async def test_a_turn_bound_to_its_connection_ends_with_it(this: Served) -> None:
    async with this.socket() as wire:
        session_id = wire.hello["session_id"]
        fields = turn(input_ids=[7], max_tokens=4000, on_disconnect="cancel")
        await wire.send("turn.create", turn_id="t1", **fields)
        await wire.until("turn.delta")
    await this.until(lambda: this.sessions.turn(ANONYMOUS, session_id, "t1").end is not None)
    assert this.sessions.turn(ANONYMOUS, session_id, "t1").status == "cancelled"


@served(send_timeout_s=0.3)
async def test_a_reader_that_stalls_is_let_go_and_its_session_stays(this: Served) -> None:
    session_id = await this.open()
    sockets = this.sockets
    async with this.bare_socket(session_id, sock=await narrow_socket(this.port), max_queue=1):
        await this.until(lambda: sockets.num_attached == 1)
        await flood(this, session_id)
        await this.until(lambda: sockets.num_attached == 0)
    async with this.socket(session_id) as wire:
        assert (await wire.turn("t1"))["type"] == "turn.completed"


def test_repeats_that_are_not_read_hold_one_outbox_and_one_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A repeat may be megabytes: hundreds of them would be held for one socket."""
    monkeypatch.setattr(frame_queue, "MAX_OUTBOX_BYTES", 100_000)
    queued: list[int] = []
    sizes: list[int] = []
    send_repeat = SessionProtocol.send_repeat

    def counted(self: SessionProtocol, *args: Any, **fields: Any) -> None:
        before = self.outbox_bytes
        send_repeat(self, *args, **fields)
        sizes.append(self.outbox_bytes - before)
        queued.append(self.outbox_bytes)

    monkeypatch.setattr(SessionProtocol, "send_repeat", counted)

    @served(send_timeout_s=0.2)
    async def test(this: Served) -> None:
        session_id = await this.open()
        body = turn(input_ids=[7], turn_id="t", max_tokens=1500)
        body["sampling"] |= {"logprobs": True}
        await this.http.post(f"/v1/sessions/{session_id}/turns", json=body)
        narrow = await narrow_socket(this.port)
        async with this.bare_socket(session_id, sock=narrow, max_queue=1) as wire:
            with contextlib.suppress(ConnectionClosed):
                for _ in range(150):
                    await wire.send("turn.create", **body)
            await this.until(lambda: this.sockets.num_attached == 0)
            wire.socket.transport.abort()

    test()
    assert min(sizes) > 50_000
    assert max(queued) < 100_000 + max(sizes)


def test_a_reader_that_fell_behind_the_journal_is_given_the_state_instead() -> None:
    async def test() -> None:
        async with far_behind() as (this, session_id, wire):
            last_seq = this.sessions.get(ANONYMOUS, session_id).seq
            failed = await wire.until("session.resume_failed")
            assert failed["reason"] == "offset_lost"
            snapshot = await wire.until("session.snapshot")
            assert snapshot["seq"] <= last_seq
            while wire.frames[-1].get("seq") != last_seq:
                await wire.receive()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_reader_that_fell_behind_a_session_that_closed_is_told_so_and_hears_its_end() -> None:
    async def test() -> None:
        async with far_behind() as (this, session_id, wire):
            this.sessions.close(ANONYMOUS, session_id)
            assert await wire.close_code() == 4410
            assert wire.frames[-2] == {"type": "session.resume_failed", "reason": "offset_lost"}
            assert wire.frames[-1]["type"] == "session.closed"

    asyncio.run(asyncio.wait_for(test(), 60))


@asynccontextmanager
async def far_behind() -> AsyncIterator[tuple[Served, str, Wire]]:
    """A session and its reader, which took nothing of all that the journal has forgotten since."""
    async with serving(limits=small_journal(4), send_timeout_s=30.0) as this:
        session_id = await this.open()
        narrow = await narrow_socket(this.port)
        async with this.bare_socket(session_id, sock=narrow, max_queue=1) as wire:
            await this.until(lambda: this.sockets.num_attached == 1)
            await flood(this, session_id)
            yield this, session_id, wire


async def flood(this: Served, session_id: str) -> None:
    """More frames than the kernel buffers for a reader that reads nothing: 16 MB."""
    metadata = {str(key): "x" * 512 for key in range(16)}
    for _ in range(2000):
        this.sessions.update(ANONYMOUS, session_id, metadata=metadata)
        await asyncio.sleep(0)


@served(keys=KEYS)
async def test_a_key_comes_by_header_by_subprotocol_or_as_first_message(this: Served) -> None:
    header: dict[str, Any] = {"additional_headers": {"authorization": "Bearer secret"}}
    async with this.socket(**header) as wire:
        session_id = wire.hello["session_id"]
    offered: dict[str, Any] = {"subprotocols": [SUBPROTOCOL, "bearer.secret"]}
    async with this.socket(session_id, **offered) as wire:
        assert wire.hello["session_id"] == session_id
        assert wire.socket.subprotocol == "kvsession.v1"
    async with this.socket(session_id, subprotocols=["bearer.secret"]) as wire:
        assert wire.hello["session_id"] == session_id
        assert wire.socket.subprotocol is None
    async with this.bare_socket(session_id) as wire:
        await wire.send("session.auth", token="secret")
        assert (await wire.receive())["type"] == "session.opened"
        assert (await wire.turn("t1"))["type"] == "turn.completed"


@served(keys=KEYS, auth_timeout_s=0.2)
async def test_no_or_a_wrong_key_opens_nothing(this: Served) -> None:
    wrong: dict[str, Any] = {"additional_headers": {"authorization": "Bearer wrong"}}
    with pytest.raises(InvalidStatus) as refused:
        async with this.socket(**wrong):
            pass
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "unauthorized"
    for first, code in ((("session.auth", "wrong"), 4401), (("ping", None), 4400), (None, 4401)):
        async with this.bare_socket() as wire:
            if first is not None and first[1]:
                await wire.send(first[0], token=first[1])
            elif first is not None:
                await wire.send(first[0])
            assert await wire.close_code() == code
            assert wire.frames[0]["error"]["code"] == "unauthorized"
    assert this.sessions.stats().sessions == 0


@served(keys=KEYS)
async def test_another_keys_session_does_not_exist(this: Served) -> None:
    async with this.socket(additional_headers={"authorization": "Bearer secret"}) as wire:
        session_id = wire.hello["session_id"]
    for name in (session_id, "nobody"):
        with pytest.raises(InvalidStatus) as refused:
            async with this.socket(name, additional_headers={"authorization": "Bearer other"}):
                pass
        assert refused.value.response.status_code == 404


@served(keys=KEYS)
async def test_equal_session_names_of_two_keys_share_neither_connection_nor_readers(
    this: Served,
) -> None:
    """Ids are the client's choice, per key: a stranger's choice must not touch mine."""
    headers = [{"authorization": f"Bearer {key}"} for key in ("secret", "other")]
    for header in headers:
        opened = await this.http.post("/v1/sessions", json={"id": "chat"}, headers=header)
        assert opened.status_code == 201
    fields = turn(input_ids=[7], max_tokens=4000, on_disconnect="cancel")
    async with this.socket("chat", additional_headers=headers[0]) as mine:
        await mine.send("turn.create", turn_id="t1", **fields)
        await mine.until("turn.delta")
        async with this.socket("chat", additional_headers=headers[1]) as theirs:
            await theirs.send("turn.create", turn_id="t1", **fields)
            await theirs.until("turn.delta")
        # Their last reader is gone, and mine reads on: one turn ends, the other does not.
        path = "/v1/sessions/chat/turns/t1"

        async def status(header: dict[str, str]) -> str:
            answer = await this.http.get(path, headers=header)
            return str(answer.json()["status"])

        while await status(headers[1]) == "running":
            await asyncio.sleep(0.002)
        assert await status(headers[1]) == "cancelled"
        assert await status(headers[0]) == "running"
        await mine.send("turn.cancel")
        assert (await mine.until("turn.cancelled"))["reason"] == "client_cancelled"


def test_a_refused_handshake_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse() -> None:
        async with serving() as this:
            with pytest.raises(InvalidStatus):
                async with this.socket("nobody"):
                    pass
            await this.until(lambda: not this.server.server_state.tasks)

    asyncio.run(refuse())
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@served(allowed_origins=("https://app.example",))
async def test_browsers_come_from_here_or_from_an_allowed_origin(this: Served) -> None:
    for origin in (this.url, "http://localhost:3000", "https://app.example"):
        async with this.socket(origin=origin) as wire:
            assert wire.hello["type"] == "session.opened"
    for origin in ("https://evil.example", "null", "https://app.example.evil.example"):
        with pytest.raises(InvalidStatus) as refused:
            async with this.socket(origin=origin):
                pass
        assert refused.value.response.status_code == 403


@served()
async def test_a_browser_is_told_in_a_close_code_what_it_cannot_see_in_a_status(
    this: Served,
) -> None:
    async with this.bare_socket("nobody", origin=this.url) as wire:
        assert await wire.close_code() == 4404
        assert wire.frames[0]["error"]["code"] == "session_not_found"


@served(max_connections=2)
async def test_connections_are_bounded_and_given_back(this: Served) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(this.socket())
        with pytest.raises(InvalidStatus) as refused:
            async with this.socket():
                pass
        assert refused.value.response.status_code == 503
    await this.until(lambda: not this.sockets.num_attached)
    async with this.socket() as wire:
        assert wire.hello["type"] == "session.opened"


@served(idle_s=0.1)
async def test_an_idle_connection_is_closed_and_its_session_stays(this: Served) -> None:
    async with this.socket() as wire:
        assert await wire.close_code() == 4408
    assert this.sessions.get(ANONYMOUS, wire.hello["session_id"]).state == "cold"


@pytest.mark.parametrize(
    "query", ["?after=x", "?after=-1", "?after=" + "9" * 30, "?after=1&epoch=" + "a" * 99]
)
def test_a_resume_point_that_is_none_is_refused(query: str) -> None:
    @served()
    async def test(this: Served) -> None:
        with pytest.raises(InvalidStatus) as refused:
            async with this.socket(await this.open(), query):
                pass
        assert refused.value.response.status_code == 400

    test()
