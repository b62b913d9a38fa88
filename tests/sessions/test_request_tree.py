from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from weakref import ref

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from session_server.core.commands import SubmitTurn
from session_server.core.errors import (
    ContextTooLong,
    InvalidRequest,
    QuotaExceeded,
    ServerBusy,
    SessionBusy,
    SessionNotFound,
    TurnConflict,
    TurnNotFound,
)
from session_server.core.session_events import (
    TextInput,
    TokenInput,
    TurnCancelled,
    TurnCompleted,
)
from session_server.sessions import request_tree
from session_server.sessions.footprint import text_bytes
from session_server.sessions.journal import JournalLimits
from session_server.sessions.quotas import SessionLimits
from session_server.sessions.request_tree import (
    NODE_BYTES,
    Branch,
    BranchPoint,
    RequestTrees,
)
from session_server.text.tokenizer import Tokenizer
from tests.sessions.recount import recount
from tests.sessions.world import OWNER, World, turn


@pytest.fixture
def world() -> Iterator[World]:
    with World("llama3") as made:
        yield made


class Tree:
    """One session and its requests; each is played to its end unless told otherwise."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.trees = RequestTrees(world.manager)
        self.session = world.open()

    def start(self, name: str, ids: tuple[int, ...], **point: object) -> Branch:
        request = turn("only", ids, max_tokens=4, ignore_eos=True)
        return self.world.do(
            self.trees.submit(
                OWNER,
                self.session,
                rid=name,
                point=BranchPoint(**point),  # type: ignore[arg-type]
                request=request,
            )
        )

    def run(self, name: str, ids: tuple[int, ...], **point: object) -> tuple[int, tuple[int, ...]]:
        """Length of the context, and the output."""
        branch = self.start(name, ids, **point)
        self.world.engine.run()
        end = next(
            found.entry
            for found in branch.view.journal.read(0)
            if isinstance(found.entry, TurnCompleted)
        )
        return end.outcome.usage.input_tokens, end.outcome.token_ids

    def continuation(self, context: tuple[int, ...]) -> tuple[int, ...]:
        """What the model says after `context`."""
        tokens = list(context)
        for _ in range(4):
            tokens.append(self.world.engine.next_token(tokens))  # type: ignore[misc]
        return tuple(tokens[len(context) :])


@pytest.fixture
def tree(world: World) -> Tree:
    return Tree(world)


def test_a_request_goes_on_from_the_one_it_names(tree: Tree) -> None:
    _, first = tree.run("a", (60, 61))
    length, second = tree.run("b", (62,), rid="a")
    assert length == 2 + 4 + 1
    assert second == tree.continuation((60, 61, *first, 62))


def test_two_requests_may_branch_from_one(tree: Tree) -> None:
    _, first = tree.run("a", (60, 61))
    for rid, token in (("b", 62), ("c", 63)):
        _, output = tree.run(rid, (token,), rid="a")
        assert output == tree.continuation((60, 61, *first, token))


def test_without_a_name_a_request_begins_anew(tree: Tree) -> None:
    tree.run("a", (60, 61))
    assert tree.run("b", (62,)) == (1, tree.continuation((62,)))


@pytest.mark.parametrize("offset", [1, 3, -1, -2, 100])
def test_an_offset_cuts_like_a_slice(tree: Tree, offset: int) -> None:
    _, first = tree.run("a", (60, 61))
    _, output = tree.run("b", (62,), rid="a", offset=offset)
    assert output == tree.continuation((*(60, 61, *first)[:offset], 62))


def test_the_previous_output_can_be_dropped(tree: Tree) -> None:
    tree.run("a", (60, 61))
    _, output = tree.run("b", (62,), rid="a", drop_previous_output=True)
    assert output == tree.continuation((60, 61, 62))


def test_replacing_removes_the_descendants(tree: Tree) -> None:
    _, first = tree.run("a", (60, 61))
    tree.run("b", (62,), rid="a")
    tree.run("c", (63,), rid="b")
    _, output = tree.run("d", (64,), rid="a", replace=True)
    assert output == tree.continuation((60, 61, *first, 64))
    for gone in ("b", "c"):
        with pytest.raises(TurnNotFound):
            tree.start("x", (60,), rid=gone)
    tree.run("b", (62,), rid="d")


def test_replacing_without_a_name_clears_the_session(tree: Tree) -> None:
    tree.run("a", (60, 61))
    assert tree.run("b", (62,), replace=True) == (1, tree.continuation((62,)))
    with pytest.raises(TurnNotFound):
        tree.start("x", (60,), rid="a")


def test_replacing_ends_a_request_that_runs_and_goes_on_from_what_it_has(
    world: World, tree: Tree
) -> None:
    running = tree.start("a", (60, 61))
    world.engine.step()
    world.engine.deliver()

    async def play() -> Branch:
        point = BranchPoint(rid="a", replace=True)
        request = turn("only", (62,), max_tokens=4, ignore_eos=True)
        task = asyncio.create_task(
            tree.trees.submit(OWNER, tree.session, rid="b", point=point, request=request)
        )
        await asyncio.sleep(0)
        world.engine.run()
        return await task

    branch = world.do(play())
    world.engine.run()
    ends = [f.entry for f in running.view.journal.read(0) if isinstance(f.entry, TurnCancelled)]
    kept = ends[0].outcome.token_ids
    assert len(kept) == 1
    end = branch.view.journal.read(branch.view.journal.last_seq - 2)[0].entry
    assert isinstance(end, TurnCompleted)
    assert end.outcome.token_ids == tree.continuation((60, 61, *kept, 62))


def test_a_request_that_runs_cannot_be_appended_to(world: World, tree: Tree) -> None:
    tree.start("a", (60, 61))
    with pytest.raises(SessionBusy, match="hasn't finished"):
        tree.start("b", (62,), rid="a")
    world.engine.run()
    tree.run("b", (62,), rid="a")


def test_refusals_leave_no_trace(world: World, tree: Tree) -> None:
    with pytest.raises(TurnNotFound, match="Invalid request session id"):
        tree.start("a", (60,), rid="nobody")
    with pytest.raises(InvalidRequest):
        tree.start("a", ())
    with pytest.raises(InvalidRequest):
        tree.start("a", (world.engine.vocab_size,))
    tree.run("a", (60,))
    with pytest.raises(TurnConflict):
        tree.start("a", (60,))
    with pytest.raises(InvalidRequest, match="must contain input tokens"):
        tree.start("b", (), rid="a")
    assert world.manager.stats().sessions == 1


def test_a_failed_request_is_no_parent(world: World, tree: Tree) -> None:
    tree.start("a", (60,))
    world.engine.step()
    world.engine.fail(next(iter(world.engine.slots)), "numerical_error")
    world.engine.run()
    with pytest.raises(TurnNotFound):
        tree.start("b", (61,), rid="a")


def test_a_request_that_ended_leaves_its_tokens_and_nothing_of_its_turn(
    world: World, tree: Tree
) -> None:
    branch = tree.start("a", (60, 61))
    world.engine.run()
    journal = ref(branch.view.journal)
    del branch
    assert journal() is None
    assert (
        world.manager._maker.replay.num_bytes
        == world.manager.journal(OWNER, tree.session).num_bytes
    )


def test_a_text_that_waits_to_be_tokenized_counts_as_bytes_of_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, text = world.manager._quotas.turn_bytes, "word " * 100
    encode, seen = Tokenizer.encode_control, list[int]()

    def note(self: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
        seen.append(counted.total)
        return encode(self, text, add_bos=add_bos)

    monkeypatch.setattr(Tokenizer, "encode_control", note)
    counted._limit = text_bytes(text) - 1
    with pytest.raises(ServerBusy, match="bytes of unfinished turns"):
        world.do(world.manager.encode(OWNER, TextInput(text), add_bos=True))
    assert (seen, counted.total) == ([], 0)
    counted._limit += 1
    world.do(world.manager.encode(OWNER, TextInput(text), add_bos=True))
    assert (seen, counted.total) == ([text_bytes(text)], 0)


def test_ids_that_fit_no_context_are_not_copied_into_the_tree(world: World, tree: Tree) -> None:
    with pytest.raises(ContextTooLong, match=r"\(500000 tokens\).*\(4095 tokens\)"):
        tree.start("a", (60,) * 500_000)
    assert world.manager.stats().sessions == 1
    tree.run("a", (60,))


def test_what_a_tree_keeps_counts_as_bytes_of_its_session(world: World, tree: Tree) -> None:
    counted = world.manager._quotas.history_bytes
    recount(world.manager)
    before = counted.total
    tree.run("a", (60,) * 100)
    first = counted.total - before
    recount(world.manager)
    assert 100 * 4 < first - NODE_BYTES < 100 * 4 + 200
    tree.run("b", (61,), rid="a")
    assert NODE_BYTES < counted.total - before - first < NODE_BYTES + 200
    tree.run("c", (62,), replace=True)
    assert counted.total - before < first
    world.manager.close(OWNER, tree.session)
    recount(world.manager)
    assert counted.total == 0


@pytest.mark.parametrize("room", [NODE_BYTES, 1 << 20])
def test_a_request_without_room_is_refused_and_leaves_no_trace(
    world: World, tree: Tree, room: int
) -> None:
    tree.run("a", (60,))
    counted = world.manager._quotas.history_bytes
    counted._limit = counted.total + room
    if room == NODE_BYTES:
        with pytest.raises(ServerBusy, match="bytes of conversations"):
            tree.start("b", (61,), rid="a")
        with pytest.raises(TurnNotFound):
            tree.start("c", (61,), rid="b")
    else:
        tree.run("b", (61,), rid="a")
    recount(world.manager)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_request_closed_soon_can_be_gone_on_from(
    world: World, tree: Tree, num_steps: int
) -> None:
    """Its journal has as few as three entries."""
    branch = tree.start("a", (60, 61))
    for _ in range(num_steps):
        world.engine.step()
        world.engine.deliver()
    world.manager.close(OWNER, branch.session_id)
    world.engine.run()
    kept = tree.continuation((60, 61))[:num_steps]
    _, output = tree.run("b", (62,), rid="a")
    assert output == tree.continuation((60, 61, *kept, 62))


def test_a_journal_that_was_trimmed_to_its_last_entry_changes_nothing() -> None:
    limits = SessionLimits(journal=JournalLimits(max_entries=1))
    with World("llama3", limits=limits) as world:
        tree = Tree(world)
        tree.start("a", (60, 61))
        world.engine.run()
        branch = tree.start("b", (62,), rid="a")
        world.engine.step()
        world.engine.deliver()
        output = tree.continuation((60, 61))
        live = world.manager._sessions.get(OWNER, branch.session_id).live
        assert live is not None
        assert live.request.input == TokenInput((60, 61, *output, 62))


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_deep_tree_gives_every_request_the_context_that_slices_give(data: st.DataObject) -> None:
    with World("llama3") as world:
        tree = Tree(world)
        contexts: dict[str, tuple[int, ...]] = {}
        outputs: dict[str, tuple[int, ...]] = {}
        for index in range(8):
            parent = data.draw(st.sampled_from([None, *contexts]))
            offset = data.draw(st.sampled_from([None, 0, 1, 3, -1, -2, 50]))
            drop = data.draw(st.booleans())
            new = tuple(data.draw(st.lists(st.integers(60, 90), min_size=1, max_size=3)))
            base: tuple[int, ...] = ()
            if parent is not None:
                base = contexts[parent] + (() if drop else outputs[parent])
                base = base[:offset] if offset else base
            name = str(index)
            length, outputs[name] = tree.run(
                name, new, rid=parent, offset=offset, drop_previous_output=drop
            )
            contexts[name] = base + new
            assert length == len(contexts[name])
            assert outputs[name] == tree.continuation(contexts[name])


def test_text_gets_a_bos_only_where_a_conversation_begins(world: World, tree: Tree) -> None:
    async def both() -> None:
        for rid, parent in (("a", None), ("b", "a")):
            request = turn("only", TextInput("Hello"), max_tokens=1)
            point = BranchPoint(rid=parent)
            await tree.trees.submit(OWNER, tree.session, rid=rid, point=point, request=request)
            world.engine.run()

    world.do(both())
    contexts = [each.tokens for each in world.engine.seen if isinstance(each, SubmitTurn)]
    assert contexts[1].count(world.text.bos_token_id) == 1


def test_a_long_text_is_encoded_off_the_event_loop(
    world: World, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()
    encode = Tokenizer.encode_control

    def encode_and_note(tokenizer: Tokenizer, text: str, *, add_bos: bool = False) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(tokenizer, text, add_bos=add_bos)

    monkeypatch.setattr(Tokenizer, "encode_control", encode_and_note)
    for name, text in (("short", "Hi"), ("long", "quick" * 900)):
        request = replace(turn("only", (1,)), input=TextInput(text))
        world.do(
            tree.trees.submit(OWNER, tree.session, rid=name, point=BranchPoint(), request=request)
        )
        world.engine.run()
    assert threads == ["MainThread", "tokenize"]


def test_a_tree_is_bounded_and_goes_with_its_session(
    world: World, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_tree, "MAX_NODES", 2)
    tree.run("a", (60,))
    tree.run("b", (60,))
    with pytest.raises(QuotaExceeded):
        tree.start("c", (60,))
    world.manager.close(OWNER, tree.session)
    with pytest.raises(SessionNotFound):
        tree.start("c", (60,))


def test_a_tree_goes_with_its_session_while_a_request_of_it_runs(world: World, tree: Tree) -> None:
    tree.run("a", (60,) * 100)
    branch = tree.start("b", (60,))
    world.engine.step()
    world.engine.deliver()
    kept = ref(tree.trees._trees[world.manager.journal(OWNER, tree.session)])
    assert kept() is not None
    world.manager.close(OWNER, tree.session)
    gc.collect()
    assert kept() is None, "nothing holds what nothing counts"
    world.engine.run()
    assert branch.view.journal.is_closed
    recount(world.manager)


def test_requests_keep_the_session_alive(world: World, tree: Tree) -> None:
    for index in range(5):
        world.now_s += 800
        tree.run(str(index), (60,))
        world.manager.tick()
    assert world.manager.get(OWNER, tree.session).state == "cold"
