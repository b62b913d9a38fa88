"""OpenAI's Realtime over real sockets: every event is judged by the SDK's types."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.protocol import State
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from session_server.core.errors import SessionNotFound
from session_server.core.owner import ANONYMOUS
from session_server.protocol.session_protocol import CloseCode
from session_server.sessions.drafts import SessionDrafts
from session_server.web.keys import KeyRing
from session_server.web.realtime import RealtimeSocket
from tests.web.realtime_client import RealtimeWire, message, realtime, usage
from tests.web.serving import WORD, Served, served, serving, small_journal, turn
from tests.web.wire_client import narrow_socket

RESPONSE = [
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "conversation.item.done",
    "response.done",
]


ONCE = {*RESPONSE} - {
    "conversation.item.added",
    "conversation.item.done",
    "response.output_text.delta",
}


def session_of(wire: RealtimeWire) -> str:
    session_id: str = wire.events[0]["session"]["id"]
    return session_id


async def gone(this: Served, session_id: str) -> None:
    """Wait until a session is closed."""

    def is_gone() -> bool:
        try:
            this.sessions.get(ANONYMOUS, session_id)
        except SessionNotFound:
            return True
        return False

    await this.until(is_gone)


@served()
async def test_a_response_is_told_in_the_order_of_the_real_thing(this: Served) -> None:
    async with realtime(this.url, "?model=paper") as wire:
        created = wire.events[0]["session"]
        assert (created["model"], created["output_modalities"]) == ("paper", ["text"])
        item_id = await wire.say("Hello")
        response = await wire.answer(metadata={"topic": "greeting"})
        kinds = wire.kinds()[2:]
        assert kinds[:2] == ["conversation.item.added", "conversation.item.done"]
        assert list(dict.fromkeys(kinds[2:])) == RESPONSE
        assert response["status"] == "incomplete"
        assert response["status_details"]["reason"] == "max_output_tokens"
        assert response["metadata"] == {"topic": "greeting"}
        assert response["conversation_id"] == wire.events[1]["conversation"]["id"]
        answer = response["output"][0]
        deltas = [event["delta"] for event in wire.events if "delta" in event]
        assert "".join(deltas) == answer["content"][0]["text"]
        assert wire.events[-2]["previous_item_id"] == item_id
        assert len({event["event_id"] for event in wire.events}) == len(wire.events)


@served()
async def test_ten_turns_compute_what_is_new(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.send("session.update", session={"instructions": "Be brief."})
        updated = await wire.until("session.updated")
        assert updated["session"]["instructions"] == "Be brief."
        before = 0
        for number in range(10):
            await wire.say(f"Number {number}")
            context, cached, total = usage(await wire.answer())
            assert cached in ((before, before - 1) if before else (0,))
            assert total == context + 4
            before = total
    await gone(this, session_of(wire))


@served()
async def test_a_changed_conversation_is_computed_from_where_it_changed(this: Served) -> None:
    async with realtime(this.url) as wire:
        ids = []
        for number in range(3):
            ids.append(await wire.say(f"Number {number}"))
            before = usage(await wire.answer())
            ids.append(wire.events[-1]["response"]["output"][0]["id"])
        await wire.send("conversation.item.delete", item_id=ids[-1])
        assert (await wire.until("conversation.item.deleted"))["item_id"] == ids[-1]
        context, cached, _ = usage(await wire.answer())
        assert context == before[0]
        assert before[0] - 32 < cached < before[0]
        await wire.send(
            "conversation.item.create", item=message("Be brief.", "system"), previous_item_id="root"
        )
        assert (await wire.until("conversation.item.added"))["previous_item_id"] is None
        context, cached, _ = usage(await wire.answer())
        assert cached < 8 < context
        await wire.send(
            "conversation.item.create",
            item=message("Between", id="mine"),
            previous_item_id=ids[1],
        )
        assert (await wire.until("conversation.item.done"))["previous_item_id"] == ids[1]
        await wire.send("conversation.item.retrieve", item_id="mine")
        retrieved = (await wire.until("conversation.item.retrieved"))["item"]
        assert (retrieved["id"], retrieved["content"][0]["text"]) == ("mine", "Between")
        await wire.answer()
        items = await this.http.get(f"/v1/sessions/{session_of(wire)}/items")
        said = [item["content"] for item in items.json()["data"]]
        assert said[:4] == ["Be brief.", "Number 0", said[2], "Between"]


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"type": "response.cancel"}, "response_cancel_not_active", None),
    ({"type": "response.cancel", "response_id": "r"}, "response_cancel_not_active", None),
    ({"type": "response.create"}, "invalid_value", None),
    (
        {"type": "conversation.item.delete", "item_id": "no"},
        "item_delete_invalid_item_id",
        "item_id",
    ),
    (
        {"type": "conversation.item.retrieve", "item_id": "no"},
        "item_retrieve_invalid_item_id",
        "item_id",
    ),
    (
        {"type": "conversation.item.create", "item": message("a"), "previous_item_id": "no"},
        "invalid_value",
        "previous_item_id",
    ),
    (
        {"type": "session.update", "session": {"temperature": -1}},
        "invalid_value",
        "session.temperature",
    ),
    (
        {"type": "session.update", "session": {"modalities": ["audio"]}},
        "unsupported_operation",
        "session.modalities",
    ),
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "invalid_value", "type"),
    ({"type": "nothing"}, "invalid_event", "type"),
    (
        {
            "type": "response.create",
            "response": {"input": [{"type": "item_reference", "id": "no"}]},
        },
        "invalid_value",
        "response.input",
    ),
]


@served()
async def test_what_has_no_effect_says_why_and_to_which_event(this: Served) -> None:
    async with realtime(this.url) as wire:
        for number, (event, code, param) in enumerate(REFUSED):
            await wire.send(**_kind(event), event_id=f"mine_{number}")
            error = await wire.refusal()
            assert (error["code"], error["param"]) == (code, param), event
            assert error["event_id"] == f"mine_{number}"
        item_id = await wire.say("Hello", id="mine")
        await wire.send(
            "conversation.item.truncate", item_id=item_id, content_index=0, audio_end_ms=1
        )
        assert (await wire.refusal())["code"] == "invalid_value"
        await wire.send("conversation.item.create", item=message("Again", id="mine"))
        assert (await wire.refusal())["param"] == "item.id"
        await wire.answer()


def _kind(event: dict[str, Any]) -> dict[str, Any]:
    return {"kind": event["type"], **{key: event[key] for key in event if key != "type"}}


@served()
async def test_names_of_the_beta_are_read_and_never_sent(this: Served) -> None:
    async with realtime(this.url) as wire:
        settings = {"modalities": ["text", "audio"], "max_response_output_tokens": 3, "voice": "a"}
        await wire.send("session.update", session=settings)
        updated = (await wire.until("session.updated"))["session"]
        assert (updated["output_modalities"], updated["max_output_tokens"]) == (["text"], 3)
        content = [{"type": "text", "text": "I am."}]
        item = {"type": "message", "role": "assistant", "content": content}
        await wire.send("conversation.item.create", item=item)
        done = await wire.until("conversation.item.done")
        assert done["item"]["content"] == [{"type": "output_text", "text": "I am."}]
        await wire.say("Are you?")
        await wire.send("response.create")
        response = (await wire.until("response.done"))["response"]
        assert (response["usage"]["output_tokens"], response["max_output_tokens"]) == (3, 3)


@served()
async def test_one_response_at_a_time_answers_the_conversation(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        this.is_held = True
        await wire.send("response.create", response={"max_output_tokens": 4})
        created = await wire.until("response.created")
        await wire.send("response.create", event_id="twice")
        error = await wire.refusal()
        assert error["code"] == "conversation_already_has_active_response"
        assert created["response"]["id"] in error["message"]
        assert error["event_id"] == "twice"
        this.is_held = False
        assert (await wire.until("response.done"))["response"]["id"] == created["response"]["id"]


@served()
async def test_a_cancel_keeps_what_was_said(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        await wire.send("response.create")
        await wire.until("response.output_text.delta")
        await wire.send("response.cancel")
        response = (await wire.until("response.done"))["response"]
        assert response["status"] == "cancelled"
        assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        said = response["output"][0]
        assert said["status"] == "incomplete"
        total = usage(response)[2]
        await wire.send("conversation.item.retrieve", item_id=said["id"])
        kept = (await wire.until("conversation.item.retrieved"))["item"]
        assert kept["content"] == said["content"]
        await wire.say("Go on")
        assert usage(await wire.answer())[1] in (total, total - 1)


@served()
async def test_a_create_right_behind_a_cancel_waits_for_its_end(this: Served) -> None:
    """The classic race, a hundred times: no error, and never two responses at once."""
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        await wire.send("response.create", response={"max_output_tokens": 200})
        for number in range(100):
            if number % 3:
                await wire.until("response.output_text.delta")
            await wire.send("response.cancel")
            await wire.send("response.create", response={"max_output_tokens": 200})
            if number % 4 == 0:
                await wire.send("response.cancel")
                await wire.send("response.create", response={"max_output_tokens": 200})
            await wire.until("response.done")
        while wire.kinds().count("response.done") < 1 + 100 + 25:
            await wire.until("response.done")
        edges = [kind for kind in wire.kinds() if kind in ("response.created", "response.done")]
        assert edges == ["response.created", "response.done"] * (1 + 100 + 25)
        assert "error" not in wire.kinds()


@served()
async def test_a_cancel_finds_a_response_that_has_not_begun(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        this.is_held = True
        await wire.send("response.create")
        await wire.send("response.cancel")
        this.is_held = False
        response = (await wire.until("response.done"))["response"]
        assert response["status"] == "cancelled"
        assert (await wire.answer())["status"] == "incomplete"


@served()
async def test_a_response_beside_the_conversation_leaves_no_item(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        this.is_held = True
        await wire.send("response.create", response={"max_output_tokens": 4})
        await wire.until("response.created")
        beside = {"conversation": "none", "max_output_tokens": 2, "metadata": {"beside": "yes"}}
        await wire.send("response.create", response=beside)
        created = (await wire.until("response.created"))["response"]
        assert created["conversation_id"] is None
        this.is_held = False
        ended = [(await wire.until("response.done"))["response"] for _ in range(2)]
        by_metadata = {bool(each["metadata"]): each for each in ended}
        assert by_metadata[True]["usage"]["output_tokens"] == 2
        added = wire.ids()
        assert by_metadata[True]["output"][0]["id"] not in added
        assert by_metadata[False]["output"][0]["id"] in added
        given = [message("Only this"), {"type": "item_reference", "id": added[0]}]
        own = await wire.answer(input=given, instructions="Be brief.")
        assert own["output"][0]["id"] in wire.ids()
        await this.until(lambda: this.sessions.stats().sessions == 1)


@served()
async def test_responses_beside_the_conversation_end_with_their_connection(this: Served) -> None:
    beside = {"conversation": "none", "input": [message("Hi")], "max_output_tokens": 1500}
    for takes_over in (False, True):
        name = f"?session_id=ada-{takes_over}"
        async with realtime(this.url, name) as wire:
            await wire.say("Hello")
            await wire.send("response.create", response=beside)
            await wire.until("response.output_text.delta")
            if not takes_over:
                await wire.socket.close()
                await this.until(lambda: this.sessions.stats().live_turns == 0)
            query = f"{name}&last_event_id={wire.events[-1]['event_id']}"
            async with realtime(this.url, query) as later:
                await this.until(lambda: this.sessions.stats().live_turns == 0)
                await later.say("And?")
                assert not any("response" in kind for kind in later.kinds())
    assert this.sessions.stats().sessions == 2


@served()
async def test_items_come_and_go_while_an_answer_runs(this: Served) -> None:
    async with realtime(this.url) as wire:
        first = await wire.say("Hello")
        await wire.send("response.create", response={"max_output_tokens": 100})
        opened = await wire.until("conversation.item.added")
        await wire.send("conversation.item.delete", item_id=opened["item"]["id"])
        await wire.until("error")
        second = await wire.say("And?")
        await wire.until("response.done")
        await wire.send("conversation.item.delete", item_id=first)
        await wire.until("conversation.item.deleted")
        assert opened["previous_item_id"] == first
        await wire.answer()
        items = await this.http.get(f"/v1/sessions/{session_of(wire)}/items")
        roles = [item["role"] for item in items.json()["data"]]
        assert roles == ["assistant", "user", "assistant"]
        assert second in wire.ids()


@served()
async def test_an_answer_is_an_item_of_its_own_whatever_ids_a_client_gives(this: Served) -> None:
    async with realtime(this.url) as wire:
        prefix, _, number = (await wire.say("Hello")).rpartition("_")
        this.is_held = True
        await wire.send("response.create", response={"max_output_tokens": 4})
        await wire.until("response.created")
        # Among them are all that the server may be about to give.
        taken = [f"{prefix}_{int(number) + each}" for each in range(1, 4)]
        taken += [f"{made}_1" for made in taken]
        for item_id in taken:
            await wire.say("Hi", id=item_id)
        this.is_held = False
        answer = (await wire.until("response.done"))["response"]["output"][0]
        assert answer["id"] not in taken
        assert wire.ids().count(answer["id"]) == 1
        assert (await wire.answer())["status"] == "incomplete"


@served()
async def test_a_plain_connection_takes_its_session_with_it(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        await wire.send("response.create")
        await wire.until("response.output_text.delta")
    await gone(this, session_of(wire))
    assert this.sessions.stats().live_turns == 0


@served()
async def test_a_conversation_goes_on_after_its_connection(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.send("session.update", session={"resumption": {"enabled": True}})
        assert (await wire.until("session.updated"))["session"]["resumption"]["enabled"]
        await wire.say("Hello")
        before = usage(await wire.answer())[2]
        await wire.say("Count")
        await wire.send("response.create", response={"max_output_tokens": 300})
        await wire.until("response.output_text.delta")
        this.is_held = True
        await this.sockets.end_all(CloseCode.RESTART)
        assert await wire.close_code() == 1012
    conversation_id = wire.events[1]["conversation"]["id"]
    async with realtime(this.url, f"?conversation_id={conversation_id}") as again:
        this.is_held = False
        response = (await again.until("response.done"))["response"]
        assert again.ids() == wire.ids()
        assert response["status"] == "incomplete"
        assert usage(response)[1] in (before, before - 1)
        deltas = "".join(event["delta"] for event in again.events if "delta" in event)
        assert deltas == response["output"][0]["content"][0]["text"]
        await again.say("Go on")
        await again.answer()
    async with realtime(this.url, f"?session_id={session_of(wire)}") as third:
        await third.send("conversation.item.retrieve", item_id="no")
        await third.until("error")
        assert third.ids() == again.ids()


@served()
async def test_a_client_that_says_what_it_has_seen_misses_nothing_and_hears_nothing_twice(
    this: Served,
) -> None:
    """The connection is cut behind every event of a conversation, and the client goes on behind
    that event."""
    cut = 0
    while True:
        cut += 1
        name = f"cut-{cut}"
        async with realtime(this.url, f"?session_id={name}") as wire:
            await wire.say("Hello")
            await wire.send("response.create", response={"max_output_tokens": 3})
            this.is_held = True
            for _ in range(cut):
                this.is_held = False
                if (await wire.receive())["type"] == "response.done":
                    break
        seen = wire.events[2:]
        last = seen[-1]["event_id"]
        async with realtime(this.url, f"?session_id={name}&last_event_id={last}") as again:
            if seen[-1]["type"] != "response.done":
                await again.until("response.done")
            assert "error" not in again.kinds()
            both = [*seen, *again.events[2:]]
            said = "".join(event["delta"] for event in both if "delta" in event)
            done = both[-1]["response"]["output"][0]
            assert said == done["content"][0]["text"], cut
            kinds = [event["type"] for event in both]
            assert all(kinds.count(kind) == 1 for kind in ONCE), (cut, kinds)
        if seen[-1]["type"] == "response.done":
            break
    assert cut > 8


@served()
async def test_the_newest_connection_has_the_conversation(this: Served) -> None:
    async with realtime(this.url, "?session_id=shared") as wire:
        await wire.say("Hello")
        async with realtime(this.url, "?session_id=shared") as again:
            assert await wire.close_code() == 4409
            assert (await again.answer())["status"] == "incomplete"
            assert len(again.ids()) == 2


@served()
async def test_a_session_of_another_surface_goes_on_here(this: Served) -> None:
    session_id = await this.open()
    async with this.socket(session_id) as native:
        await native.turn("t1", input=[{"role": "user", "content": "Hello"}])
        end = await native.turn("t2", input=[{"role": "user", "content": "And?"}])
    async with realtime(this.url, f"?session_id={session_id}") as wire:
        await wire.say("Go on")
        assert len(wire.ids()) == 5
        total = end["usage"]["total_tokens"]
        assert usage(await wire.answer())[1] in (total, total - 1)


@served()
async def test_a_session_that_ends_says_so(this: Served) -> None:
    async with realtime(this.url) as wire:
        this.sessions.close(ANONYMOUS, session_of(wire), reason="expired")
        assert (await wire.until("error"))["error"]["code"] == "session_expired"
        assert await wire.close_code() == 4410


@served()
async def test_a_draining_server_tells_answers_to_their_end(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.say("Hello")
        await wire.send("response.create")
        await wire.until("response.output_text.delta")
        drain = asyncio.create_task(this.sessions.drain(0.0))
        response = (await wire.until("response.done"))["response"]
        assert response["status"] == "cancelled"
        assert await wire.close_code() == 1012
        await drain


@served(keys=KeyRing.of("secret", "other"))
async def test_a_key_comes_in_a_header_or_a_subprotocol_and_is_not_echoed(this: Served) -> None:
    offered = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.secret")]
    async with realtime(this.url, "?session_id=s", subprotocols=offered) as wire:
        assert wire.socket.subprotocol == "realtime"
        session_id = session_of(wire)
    headers = {"authorization": "Bearer other"}
    with pytest.raises(InvalidStatus) as refused:
        async with realtime(
            this.url, f"?conversation_id=conv_{session_id}", additional_headers=headers
        ):
            pass
    assert refused.value.response.status_code == 404
    with pytest.raises(InvalidStatus) as refused:
        async with realtime(this.url):
            pass
    assert refused.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as refused:
        async with realtime(this.url, "?model=gpt-realtime", additional_headers=headers):
            pass
    assert refused.value.response.status_code == 404
    url = this.url.replace("http", "ws", 1) + "/v1/realtime"
    async with connect(
        url,
        origin=this.url,
        subprotocols=[offered[0]],
        proxy=None,  # type: ignore[arg-type]
    ) as browser:
        event = json.loads(await browser.recv())
        assert event["error"]["code"] == "unauthorized"
        await browser.wait_closed()
        assert browser.close_code == 4401


def test_what_a_journal_has_dropped_is_told_from_what_the_session_holds() -> None:
    async def run() -> None:
        async with asyncio.timeout(60), serving(limits=small_journal(8)) as this:
            for is_over in (False, True):
                query = f"?session_id=lost-{is_over}"
                async with realtime(this.url, query) as wire:
                    await wire.say("Hello")
                    limit = {"max_output_tokens": 60 if is_over else 600}
                    await wire.send("response.create", response=limit)
                    seen = (await wire.until("response.output_text.delta"))["event_id"]
                session_id = session_of(wire)

                def is_there(session_id: str = session_id, is_over: bool = is_over) -> bool:
                    view = this.sessions.get(ANONYMOUS, session_id)
                    return view.seq > 40 and (view.running_turn is None) >= is_over

                await this.until(is_there)
                this.is_held = not is_over
                async with realtime(this.url, f"{query}&last_event_id={seen}") as again:
                    this.is_held = False
                    response = (await again.until("response.done"))["response"]
                heard = wire.events[: 1 + [e["event_id"] for e in wire.events].index(seen)]
                told = "".join(e["delta"] for e in [*heard, *again.events] if "delta" in e)
                assert told == response["output"][0]["content"][0]["text"]

    asyncio.run(run())


@served(send_timeout_s=0.3)
async def test_a_client_that_reads_nothing_is_cut_and_its_conversation_stays(this: Served) -> None:
    async with realtime(this.url, "?session_id=slow") as wire:
        await wire.say("a" * 500_000, id="long")
    with contextlib.closing(await narrow_socket(this.port)) as narrow:
        loop = asyncio.get_running_loop()
        ask = {"type": "conversation.item.retrieve", "item_id": "long"}
        stream = ClientProtocol(
            parse_uri(f"ws://127.0.0.1:{this.port}/v1/realtime?session_id=slow")
        )
        stream.send_request(stream.connect())
        await loop.sock_sendall(narrow, b"".join(stream.data_to_send()))
        await this.until(lambda: this.sockets.num_attached == 1)
        stream.state = State.OPEN
        for _ in range(20):
            stream.send_text(json.dumps(ask).encode())
        await loop.sock_sendall(narrow, b"".join(stream.data_to_send()))
        await this.until(lambda: this.sockets.num_attached == 0)
    async with realtime(this.url, "?session_id=slow") as again:
        await again.until("conversation.item.done")
        assert again.ids() == ["long"]


@served()
async def test_what_the_user_is_about_to_say_is_computed_ahead(this: Served) -> None:
    async with realtime(this.url) as wire:
        await wire.send("session.update", session={"instructions": "Be brief."}, x_events=True)
        await wire.say("Hello")
        before = usage(await wire.answer())[2]
        total = 0
        for word in ("Where ", "is ", "my ", "city?"):
            await wire.send("input_text.append", text=word)
            drafted = await wire.until("input_text.drafted")
            assert drafted["kept"] <= drafted["processed"] == drafted["total"]
            assert drafted["total"] > max(total, before)
            total = drafted["total"]
        await wire.send("input_text.commit", item_id="mine")
        item = (await wire.until("conversation.item.done"))["item"]
        assert (item["id"], item["content"][0]["text"]) == ("mine", "Where is my city?")
        context, cached, _ = usage(await wire.answer())
        assert (context, cached) == (total, total - 1)  # a forward needs a query
        await wire.send("input_text.commit", event_id="again")
        refused = await wire.until("error")
        assert refused["error"]["code"] == "input_text_commit_empty"
        await wire.send("input_text.append", text="Never mi")
        await wire.until("input_text.drafted")
        await wire.send("input_text.clear")
        await wire.say("Bye")
        assert (await wire.answer())["status"] == "incomplete"
        assert len(wire.ids()) == 6


@served()
async def test_what_is_typed_while_an_answer_runs_is_computed_behind_it(this: Served) -> None:
    async with realtime(this.url, "?x_events=1") as wire:
        await wire.say("Hello")
        this.is_held = True
        await wire.send("response.create", response={"max_output_tokens": 4})
        await wire.until("response.created")
        await wire.send("input_text.append", text="And then?")
        await wire.send("response.create")  # an answer comes behind what was typed
        await wire.until("error")
        this.is_held = False
        total = usage((await wire.until("response.done"))["response"])[2]
        assert (await wire.until("input_text.drafted"))["kept"] in (total, total - 1)
    async with realtime(this.url) as plain:
        await plain.send("input_text.append", text="Hello")
        await plain.send("input_text.commit")
        await plain.until("conversation.item.done")
        await plain.answer()
        assert "input_text.drafted" not in plain.kinds()


@served()
async def test_a_key_asks_for_what_the_history_does_not_hold(this: Served) -> None:
    asked: list[int] = []
    submit = SessionDrafts.submit

    def counted(self: SessionDrafts, *args: Any) -> None:
        asked.append(len(args[2].input.messages))
        submit(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SessionDrafts, "submit", counted)
        async with realtime(this.url, "?x_events=1") as wire:
            for text in ("Hello", "Again", "Once more"):
                for key in text:
                    await wire.send("input_text.append", text=key)
                    drafted = await wire.until("input_text.drafted")
                await wire.send("input_text.commit")
                context, cached, _ = usage(await wire.answer())
                assert (context, cached) == (drafted["total"], context - 1)
            assert set(asked) == {1}
            await wire.say("First")
            await wire.send("input_text.append", text="Second")
            drafted = await wire.until("input_text.drafted")
            assert asked[-1] == 2
            await wire.send("conversation.item.delete", item_id=wire.ids()[1])
            await wire.send("input_text.append", text=" and third")
            drafted = await wire.until("input_text.drafted")
            assert asked[-1] == 7, "all of it: the history is another"
            await wire.send("input_text.commit")
            context, cached, _ = usage(await wire.answer())
            assert (context, cached) == (drafted["total"], context - 1)


@served()
async def test_a_connection_catches_up_in_slices(this: Served) -> None:
    iteration, read = 0, list[int]()
    queue_entries = RealtimeSocket._queue_entries

    async def count() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    def counted(self: RealtimeSocket) -> bool:
        read.append(iteration)
        return queue_entries(self)

    async with realtime(this.url, "?session_id=s") as wire:
        await wire.say("Hello")
        before = usage(await wire.answer())[2]
        assert before
    for number in range(3):
        body = turn(input_ids=[WORD], turn_id=f"t{number}", max_tokens=900)
        await this.http.post("/v1/sessions/s/turns", json=body)
    counting = asyncio.create_task(count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RealtimeSocket, "_queue_entries", counted)
        async with realtime(this.url, "?session_id=s"):
            assert len(set(read)) >= len(read) - 1 > 2, "the last finds nothing, and goes on"
    counting.cancel()
