"""Sessions of conversations without a name: claimed, at rest, somebody else's, spared."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy, SessionNotFound
from session_server.core.owner import Owner
from session_server.core.session_events import ChatInput, ConversationItem, Message
from session_server.sessions import transcript
from session_server.sessions.agreement import DIGEST_BYTES, agrees, digests_of, num_common
from session_server.sessions.conversations import Claim, UnnamedConversations
from session_server.sessions.footprint import TOKEN_BYTES
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.turn import TurnHooks
from tests.sessions.world import OWNER, World, completed, turn

OTHER = Owner("other")


class UnnamedCalls:
    """Unnamed calls over a world whose sessions nobody reads."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.unnamed = UnnamedConversations(world.manager, count_readers=lambda _o, _s: 0)
        self.talk: list[Message] = []
        self._count = 0

    def call(self, *messages: Message, owner: Owner = OWNER, hint: str = "") -> str:
        """Run one call to its end; the id of its session."""
        world = self.world
        claim: Claim = self.unnamed.claim(owner, ChatInput(tuple(messages)), hint=hint)
        self._count += 1
        request = turn(f"call {self._count}", ChatInput(messages, is_whole=True))
        world.do(
            world.manager.submit(
                owner,
                claim.session_id,
                request,
                hooks=TurnHooks(lambda end: self.unnamed.release(claim, end)),
            )
        )
        world.engine.run()
        end = completed_of(world, owner, claim.session_id, request.turn_id)
        self.talk = [*messages, Message("assistant", end)]
        return claim.session_id

    def go_on(self, text: str = "And?") -> str:
        """Run a call that goes on from the last one."""
        return self.call(*self.talk, Message("user", text))


def completed_of(world: World, owner: Owner, session: str, turn_id: str) -> str:
    end = world.manager.turn(owner, session, turn_id).end
    assert end is not None
    return completed(end).outcome.text


def hello(text: str = "Hello") -> Message:
    return Message("user", text)


def test_a_conversation_goes_on_in_its_session() -> None:
    with World() as world:
        calls = UnnamedCalls(world)
        session = calls.call(hello())
        assert [calls.go_on(f"And {index}?") for index in range(3)] == [session] * 3
        assert calls.call(hello(), hint="another") != session


def test_a_branch_of_a_session_that_was_used_by_its_id_is_another_session() -> None:
    """It is remembered as holding both answers, and holds one."""
    with World() as world:
        calls = UnnamedCalls(world)
        calls.call(hello())
        session = calls.go_on()
        answer = world.manager.snapshot(OWNER, session).items[1]
        world.manager.edits.rewind(OWNER, session, answer.id)
        more = (hello("And?"), Message("assistant", "Words of the client's."), hello("So?"))
        assert calls.call(*calls.talk, *more) != session
        assert world.manager.get(OWNER, session).num_turns == 2


USES: dict[str, Callable[[World, str], object]] = {
    "a turn": lambda world, session: world.run(session, turn("by id")),
    "an edit": lambda world, session: world.manager.edits.edit_item(
        OWNER, session, world.manager.snapshot(OWNER, session).items[0].id, "My edit"
    ),
    "a rewind": lambda world, session: world.manager.edits.rewind(OWNER, session, None),
    "a fork": lambda world, session: world.manager.edits.fork(OWNER, session),
    "settings": lambda world, session: world.manager.update(OWNER, session, ttl_s=60.0),
}


@pytest.mark.parametrize("use", USES)
def test_who_uses_a_session_by_its_id_has_it_alone(use: str) -> None:
    with World() as world:
        calls = UnnamedCalls(world)
        session = calls.call(hello())
        USES[use](world, session)
        before = world.manager.snapshot(OWNER, session).items
        assert calls.go_on() != session
        for index in range(70):
            calls.call(hello(str(index)))
        assert world.manager.snapshot(OWNER, session).items == before


def test_a_branch_is_a_fork_and_its_source_goes_on() -> None:
    with World() as world:
        calls = UnnamedCalls(world)
        session = calls.call(hello())
        calls.go_on()
        talk = calls.talk
        branch = calls.call(*talk[:2], Message("user", "Or?"))
        assert branch != session
        first = world.manager.snapshot(OWNER, session).items[1]
        assert (
            world.history(branch)[: first.end_len - 1]
            == (world.history(session)[: first.end_len - 1])
        )
        assert calls.go_on() == branch
        calls.talk = talk
        assert calls.go_on() == session
        assert world.manager.get(OWNER, session).num_turns == 3


BIG_USES: dict[str, Callable[[World, str, int], object]] = {
    "a turn": lambda world, session, room: world.submit(
        session, turn("big", (90,) * (room // TOKEN_BYTES + 1))
    ),
    "an edit": lambda world, session, room: world.manager.edits.edit_item(
        OWNER, session, world.manager.snapshot(OWNER, session).items[0].id, "x" * (room + 1)
    ),
    "settings": lambda world, session, room: world.manager.update(
        OWNER, session, metadata={f"{index}": "x" * 512 for index in range(16)}
    ),
}


def test_the_longest_beginning_counts_though_a_shorter_one_is_held_alone() -> None:
    with World() as world:
        calls = UnnamedCalls(world)
        short = calls.call(hello())
        alone = calls.talk
        calls.call(hello())
        for index in range(3):
            calls.go_on(f"And {index}?")
        talk = calls.talk
        branch = calls.call(*talk[:4], Message("user", "Or?"))
        assert branch != short
        base = world.manager.snapshot(OWNER, branch).items[3].end_len
        assert base > world.manager.snapshot(OWNER, short).items[-1].end_len
        calls.talk = alone
        assert calls.go_on() == short


def test_a_session_used_by_its_id_while_it_was_claimed_is_theirs_who_used_it() -> None:
    with World() as world:
        calls = UnnamedCalls(world)
        session = calls.call(hello())
        claim = calls.unnamed.claim(OWNER, ChatInput((*calls.talk, hello("And?"))), hint="")
        assert claim.session_id == session
        asked = turn("claimed", ChatInput((*calls.talk, hello("And?")), is_whole=True))
        world.do(
            world.manager.submit(
                OWNER,
                session,
                asked,
                hooks=TurnHooks(lambda end: calls.unnamed.release(claim, end)),
            )
        )
        world.manager.update(OWNER, session, ttl_s=60.0)
        world.engine.run()
        assert len(calls.unnamed.resting.of(OWNER)) == 0
        assert world.manager.get(OWNER, session).num_turns == 2


@pytest.mark.parametrize("use", BIG_USES)
def test_what_is_used_by_its_id_is_not_closed_to_make_room_for_that(use: str) -> None:
    with World(quotas=QuotaLimits(history_bytes=9_000)) as world:
        session = UnnamedCalls(world).call(hello())
        room = 9_000 - world.manager._quotas.history_bytes.total
        with pytest.raises((QuotaExceeded, ServerBusy)):
            BIG_USES[use](world, session, room)
        assert world.manager.get(OWNER, session).num_turns == 1
        completed(world.run(session, turn("small")))
        world.manager.close(OWNER, session)
        assert world.manager._quotas.history_bytes.total == 0
        assert world.manager._quotas.turn_bytes.total == 0


def test_a_fork_of_the_last_session_there_is_room_for_is_refused_and_leaves_it() -> None:
    with World(quotas=QuotaLimits(sessions=1)) as world:
        session = UnnamedCalls(world).call(hello())
        with pytest.raises((QuotaExceeded, ServerBusy)):
            world.manager.edits.fork(OWNER, session)
        assert world.manager.get(OWNER, session).num_turns == 1


def test_an_owner_at_its_own_limit_costs_others_nothing() -> None:
    with World(quotas=QuotaLimits(owner_sessions=5)) as world:
        calls = UnnamedCalls(world)
        for index in range(5):
            calls.call(hello(str(index)), owner=OTHER)
            world.open()
        with pytest.raises(QuotaExceeded):
            world.open()
        assert len(calls.unnamed.resting.of(OTHER)) == 5


def test_a_full_server_spares_sessions_of_any_owner_and_none_for_what_never_fits() -> None:
    quotas = QuotaLimits(sessions=4, history_bytes=60_000)
    with World(quotas=quotas) as world:
        calls = UnnamedCalls(world)
        oldest = calls.call(hello("0"), owner=OTHER)
        for index in range(1, 4):
            calls.call(hello(str(index)), owner=OTHER)
        session = world.open()
        with pytest.raises(SessionNotFound):
            world.manager.get(OTHER, oldest)
        assert len(calls.unnamed.resting.of(OTHER)) == 3
        with pytest.raises((QuotaExceeded, ServerBusy)):
            world.submit(session, turn("huge", "x" * 70_000))
        assert len(calls.unnamed.resting.of(OTHER)) == 3


def test_a_call_compares_digests_with_the_sessions_at_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts, and arguments that are spelled otherwise, would be read once for each of them."""
    with World() as world:
        calls = UnnamedCalls(world)
        calls.call(hello())
        talk = calls.talk
        sessions = {calls.call(*talk, hello(f"Branch {index}")) for index in range(50)}
        assert len(sessions) == 50
        read: list[Message] = []

        def counted(item: ConversationItem, message: Message) -> bool:
            read.append(message)
            return agrees(item, message)

        monkeypatch.setattr(transcript, "agrees", counted)
        chat = ChatInput((*talk, hello("Another")))
        claim = calls.unnamed.claim(OWNER, chat, hint="")
        assert not read
        assert claim.num_held == len(talk)
        assert len(world.manager.snapshot(OWNER, claim.session_id).items) == len(talk)


def test_digests_of_sessions_at_rest_count_as_theirs() -> None:
    with World() as world:
        calls = UnnamedCalls(world)
        for length in range(1, 5):
            session_id = calls.call(*calls.talk, hello())
            session = world.manager._sessions.get(OWNER, session_id)
            assert session.transcript.attached_bytes == 2 * length * DIGEST_BYTES
            assert session.counted_bytes == session.num_bytes


@pytest.mark.parametrize("num_same", [0, 1, 7, 8, 15, 16])
def test_the_messages_that_conversations_have_in_common_are_counted(num_same: int) -> None:
    said = [Message("user", str(index)) for index in range(16)]
    other = [*said[:num_same], *(hello() for _ in said[num_same:])]
    one, two = (digests_of(messages, (), hint="") for messages in (said, other))
    assert num_common(one, two) == num_same == num_common(two, one)
    assert num_common(one[: 3 * DIGEST_BYTES], two) == min(3, num_same)
