"""Many callers without names for their sessions, at once, against a model of who may get which.

Callers of two owners and some hints repeat themselves, branch, edit and ask again, while others use
the same sessions by their ids; there is room for few sessions. The seeded bugs show that the model
sees what it is there for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest

from session_server.core.errors import QuotaExceeded, ServerBusy, SessionBusy, SessionNotFound
from session_server.core.owner import Owner
from session_server.core.session_events import ChatInput, Message, TurnCompleted, TurnEnd
from session_server.sessions.conversations import Claim, UnnamedConversations
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.turn import TurnHooks
from tests.depth import at_depth
from tests.mutants.mutant import Edit, Mutant
from tests.sessions.world import World, turn

NUM_SEEDS = at_depth(12, proof=100)
NUM_STEPS = 60
OWNERS = (Owner("one"), Owner("other"))
HINTS = ("", "", "a", "b")
WANTED = (
    "found",
    "found at another's branch",
    "new",
    "forked",
    "used by its id",
    "used by its id while it was lent",
    "closed to make room",
    "refused",
    "canceled",
)

BUGS = (
    Mutant(
        "A session at rest is found by calls of another hint.",
        "systematic",
        Edit(
            "session_server.sessions.agreement:digests_of",
            'digest = _digest(b"", hint, *tools)',
            'digest = _digest(b"", *tools)',
        ),
    ),
    Mutant(
        "A session that was used by its id at rest is given to a call without a name.",
        "systematic",
        Edit(
            "session_server.sessions.resting:RestingSessions.is_unused",
            "(view.epoch, view.num_uses) == left",
            "left is not None and view.epoch == left[0]",
        ),
    ),
    Mutant(
        "A session that was used by its id while it was lent rests again.",
        "systematic",
        Edit(
            "session_server.sessions.resting:RestingSessions.leave",
            "view is None or view.num_uses > num_uses",
            "view is None",
        ),
    ),
    Mutant(
        "A session is left to the next call as what was asked, without the answer.",
        "systematic",
        Edit(
            "session_server.sessions.conversations:UnnamedConversations.release",
            "claim.said + next_digest(last, message_of_answer(end.outcome))",
            "claim.said",
        ),
    ),
    Mutant(
        "Two calls are lent one session.",
        "systematic",
        Edit(
            "session_server.sessions.resting:RestingSessions.take_unused",
            "self.take(owner, session_id)\n                return session_id",
            "return session_id",
        ),
    ),
    Mutant(
        "A branch keeps an item more than it shares.",
        "systematic",
        Edit(
            "session_server.sessions.edits:HistoryEdits.branch",
            'num_items = _index_of(source, at_item, "at_item") + 1',
            'num_items = min(_index_of(source, at_item, "at_item") + 2, num_items)',
        ),
    ),
)


@dataclass(frozen=True)
class Chat:
    """What was said in one conversation, as its caller knows it."""

    owner: Owner
    hint: str
    messages: tuple[Message, ...]

    def begins(self, other: Chat) -> bool:
        """Whether another conversation goes on from this one."""
        mine, theirs = self.messages, other.messages
        is_same = (self.owner, self.hint) == (other.owner, other.hint)
        return is_same and len(mine) < len(theirs) and theirs[: len(mine)] == mine


class Crowd:
    """Callers, and what each session must hold that was left to them. `theirs`: sessions that
    somebody has used by the id."""

    def __init__(self, seed: int) -> None:
        self.reached: Counter[str] = Counter()
        self.world = World(quotas=QuotaLimits(owner_sessions=6))
        self.unnamed = UnnamedConversations(self.world.manager, count_readers=lambda _o, _s: 0)
        self._rng = Random(seed)
        self._chats: list[Chat] = []
        self._left: dict[str, Chat] = {}
        self._lent: dict[str, Chat] = {}
        self._theirs: set[str] = set()
        self._seen: set[str] = set()
        self._num_turns = 0

    def step(self) -> None:
        """One of the callers or of the others does something."""
        verbs = [self._call] * 6 + [self._use_by_id] * 2 + [self._cancel] + [self._play] * 3
        self._rng.choice(verbs)()

    def finish(self) -> None:
        """Let all turns end."""
        self.world.engine.run()
        assert not self._lent

    def _play(self) -> None:
        self.world.engine.run()

    def _call(self) -> None:
        chat = self._next_chat()
        among = {s: left for s, left in self._left.items() if self._is_open(left.owner, s)}
        self.reached["closed to make room"] += len(self._left) - len(among)
        self._left = among
        held = {s: left for s, left in among.items() if left.begins(chat)}
        longest = max((len(left.messages) for left in held.values()), default=0)
        chat_input = ChatInput(chat.messages, is_whole=True)
        try:
            claim = self.unnamed.claim(chat.owner, chat_input, hint=chat.hint)
        except (QuotaExceeded, ServerBusy):
            self.reached["refused"] += 1
            assert not held
            return
        session_id = claim.session_id
        items = self.world.manager.snapshot(chat.owner, session_id).items
        said = tuple(Message(item.role, item.content) for item in items)
        assert session_id not in self._lent.keys() | self._theirs
        if session_id in self._seen:
            assert len(held[session_id].messages) == longest
            self.reached["found"] += 1
        else:
            assert said == chat.messages[: len(said)]
            assert len(said) >= longest
            self.reached["forked" if said else "new"] += 1
            if said:
                self._check_source(chat, said)
                self._left[session_id] = replace(chat, messages=said)
        self._submit(claim, chat)

    def _check_source(self, chat: Chat, said: tuple[Message, ...]) -> None:
        """What was forked was said under this hint."""
        sources = [*self._left.values(), *self._lent.values(), *self._chats]
        assert any(
            (source.owner, source.hint) == (chat.owner, chat.hint)
            and source.messages[: len(said)] == said
            for source in sources
        )

    def _submit(self, claim: Claim, chat: Chat) -> None:
        world, session_id = self.world, claim.session_id
        before = self._left.pop(session_id, None)
        self._lent[session_id] = chat
        self._seen.add(session_id)
        self._num_turns += 1

        def release(end: TurnEnd) -> None:
            self.unnamed.release(claim, end)
            del self._lent[session_id]
            if isinstance(end, TurnCompleted):
                answer = Message("assistant", end.outcome.text)
                answered = replace(chat, messages=(*chat.messages, answer))
                self._chats.append(answered)
                if session_id not in self._theirs:
                    self._left[session_id] = answered
            elif before is not None and session_id not in self._theirs:
                self._left[session_id] = before

        chat_input = ChatInput(chat.messages, is_whole=True)
        request = turn(f"t{self._num_turns}", chat_input, max_tokens=3, ignore_eos=True)
        world.do(world.manager.submit(claim.owner, session_id, request, hooks=TurnHooks(release)))

    def _next_chat(self) -> Chat:
        """What was said goes on, is asked again, or takes another course."""
        rng = self._rng
        question = Message("user", rng.choice("abcd"))
        if not self._chats or rng.random() < 0.2:
            return Chat(rng.choice(OWNERS), rng.choice(HINTS), (question,))
        chat = rng.choice(self._chats[-8:])
        said = chat.messages
        if rng.random() < 0.2:
            chat = replace(chat, hint=rng.choice(HINTS))
        match rng.choice(("on", "on", "on", "again", "branch", "words")):
            case "again":
                return replace(chat, messages=said[:-1])
            case "branch":
                at = 2 * rng.randrange(len(said) // 2)
                self.reached["found at another's branch"] += at > 0
                return replace(chat, messages=(*said[:at], question))
            case "words":
                words = Message("assistant", "No")
                return replace(chat, messages=(*said[:-1], words, question))
            case _:
                return replace(chat, messages=(*said, question))

    def _use_by_id(self) -> None:
        """Somebody does something with a session by its id; even what is refused is a use."""
        everybody = [*self._left.items(), *self._lent.items()]
        everybody = [(s, chat) for s, chat in everybody if self._is_open(chat.owner, s)]
        if not everybody:
            return
        session_id, chat = self._rng.choice(everybody)
        manager, owner = self.world.manager, chat.owner
        lent = " while it was lent" if session_id in self._lent else ""
        self.reached[f"used by its id{lent}"] += 1
        self._theirs.add(session_id)
        self._left.pop(session_id, None)
        try:
            match self._rng.choice(("turn", "rewind", "settings")):
                case "turn":
                    self._num_turns += 1
                    request = turn(f"t{self._num_turns}", "by id", max_tokens=3)
                    self.world.do(manager.submit(owner, session_id, request))
                case "rewind":
                    manager.edits.rewind(owner, session_id, None)
                case _:
                    manager.update(owner, session_id, ttl_s=500.0)
        except SessionBusy:
            self.reached["use refused"] += 1

    def _cancel(self) -> None:
        for session_id, chat in self._lent.items():
            self.world.manager.cancel(chat.owner, session_id, None, keep_partial=False)
            self.reached["canceled"] += 1
            return

    def _is_open(self, owner: Owner, session_id: str) -> bool:
        try:
            return self.world.manager.get(owner, session_id).state != "closing"
        except SessionNotFound:
            return False


def play(seed: int) -> Counter[str]:
    """Let one crowd have its way."""
    crowd = Crowd(seed)
    with crowd.world:
        for _ in range(NUM_STEPS):
            crowd.step()
        crowd.finish()
    return crowd.reached


def test_nobody_gets_a_session_that_is_not_theirs() -> None:
    reached: Counter[str] = sum((play(seed) for seed in range(NUM_SEEDS)), Counter())
    assert not [name for name in WANTED if not reached[name]], reached


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.bug)
def test_a_seeded_bug_is_found(bug: Mutant) -> None:
    with bug.apply(), pytest.raises((AssertionError, KeyError)):
        sum((play(seed) for seed in range(40)), Counter())
