"""Run requests that branch: the sessions of SGLang that are not streaming.

Every request is a node named by its `rid`; a later request names the node it continues and how
(append, cut at an offset, drop the last output, replace). Each runs as the only turn of a session
of its own with the whole context as input: the radix tree shares their KV, and this module needs no
KV code. The rules are those of `Session.create_req` in SGLang's session controller.

A node keeps its own tokens, four bytes each, but no journal and no logprobs of the turn that ran.
The tokens count as bytes of the session's conversation.
"""

from __future__ import annotations

import contextlib
import enum
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, assert_never
from weakref import WeakKeyDictionary, ref

from session_server.core.errors import (
    InvalidRequest,
    QuotaExceeded,
    SessionBusy,
    SessionNotFound,
    TurnConflict,
    TurnNotFound,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    ChatInput,
    ContinueInput,
    TextInput,
    TokenInput,
    TurnEnd,
    TurnFailedEntry,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.footprint import text_bytes
from session_server.sessions.journal import Journal
from session_server.sessions.manager import SessionManager
from session_server.sessions.turn import TurnHooks
from session_server.sessions.views import OpenRequest, TurnView

MAX_NODES: Final = 256
NODE_BYTES: Final = 512
"""Host memory of one node without its tokens."""


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Describe where a request continues. `rid` None starts a new context.

    `replace`: take the place of node `rid`, which is ended, and remove its descendants (without a
    `rid`: all nodes). `offset`: cut the context like a Python slice before the new input; None and
    0 do not cut. `drop_previous_output`: use the context of node `rid` without its output.
    """

    rid: str | None = None
    replace: bool = False
    offset: int | None = None
    drop_previous_output: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """Describe a running request: a turn in session `session_id`, which closes when the turn
    ends."""

    session_id: str
    view: TurnView


class NodeState(enum.Enum):
    """Define the states of a request: RUNNING -> FINISHED or FAILED. Only a finished request can be
    continued."""

    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()


@dataclass(slots=True, eq=False)
class _Node:
    """Hold one request: its context is the first `base_len` tokens of its parent's context and
    output, then its own `tokens`, to which its output is appended when it ends."""

    rid: str
    parent: _Node | None
    base_len: int
    tokens: array[int]
    session_id: str
    state: NodeState = NodeState.RUNNING
    context_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.context_len = self.base_len + len(self.tokens)

    @property
    def total_len(self) -> int:
        """Return the number of tokens of context and output."""
        return self.base_len + len(self.tokens)

    @property
    def num_bytes(self) -> int:
        """Return the host memory of this node."""
        return NODE_BYTES + text_bytes(self.rid) + sys.getsizeof(self.tokens)

    def prefix(self, length: int) -> tuple[int, ...]:
        """Return the first `length` tokens of context and output."""
        pieces: list[array[int]] = []
        node: _Node | None = self
        while node is not None:
            if length > node.base_len:
                pieces.append(node.tokens[: length - node.base_len])
                length = node.base_len
            node = node.parent
        return tuple(token for piece in reversed(pieces) for token in piece)


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Tree:
    """Hold the requests of one session by `rid`; parents come before their children."""

    owner: Owner
    session_id: str
    nodes: dict[str, _Node] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Return the host memory of all nodes."""
        return sum(node.num_bytes for node in self.nodes.values())


class RequestTrees:
    """Hold the request trees of all sessions; a tree lives as long as its session's journal."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._trees: WeakKeyDictionary[Journal, _Tree] = WeakKeyDictionary()

    async def submit(
        self, owner: Owner, session_id: str, *, rid: str, point: BranchPoint, request: TurnRequest
    ) -> Branch:
        """Run a text or token request at `point` of the session's tree under the name `rid`.

        Raises:
            SessionNotFound, SessionClosing: the session itself.
            TurnNotFound: no node `point.rid`, or its request failed.
            SessionBusy: that request has not ended.
            TurnConflict: `rid` is the name of a node already.
            QuotaExceeded: the tree is full.
            InvalidRequest: no input tokens; and whatever `SessionManager.submit` raises.
        """
        # Renews the session's time to live: the session itself never runs a turn.
        self._manager.update(owner, session_id)
        new = await self._ids(owner, request.input, is_first=point.rid is None)
        journal = self._manager.journal(owner, session_id)
        tree = self._trees.setdefault(journal, _Tree(owner, session_id))
        parent = await self._parent(tree, point)
        if rid in tree.nodes:
            raise TurnConflict("a request of this session has that rid", param="rid")
        if len(tree.nodes) >= MAX_NODES:
            raise QuotaExceeded(f"a session has at most {MAX_NODES} requests")
        return await self._run(tree, self._new_node(rid, parent, point, new), request)

    async def _run(self, tree: _Tree, node: _Node, request: TurnRequest) -> Branch:
        """Run a request as the only turn of a session of its own."""
        owner = tree.owner
        whole = replace(request, input=TokenInput(node.prefix(node.context_len)))
        self._manager.edits.parts.quotas.check_growth(owner, node.num_bytes)
        node.session_id = self._manager.open(owner, OpenRequest(single_turn=True)).session_id
        journal = self._manager.journal(owner, node.session_id)
        tree.nodes[node.rid] = node
        hooks = TurnHooks(partial(self._on_end, ref(tree), node.rid))
        try:
            view = await self._manager.submit(owner, node.session_id, whole, hooks=hooks)
        except BaseException:
            tree.nodes.pop(node.rid, None)
            if not journal.is_closed:
                self._manager.close(owner, node.session_id)
            raise
        finally:
            self._count(tree)
        return Branch(node.session_id, view)

    def _on_end(self, weak_tree: ref[_Tree], rid: str, end: TurnEnd) -> None:
        tree = weak_tree()
        node = tree.nodes.get(rid) if tree is not None else None
        if tree is None or node is None:
            return  # the tree went with its session, or the request failed to start
        if isinstance(end, TurnFailedEntry):
            node.state = NodeState.FAILED
        else:
            node.state = NodeState.FINISHED
            node.tokens.extend(end.outcome.token_ids)
        self._count(tree)

    def _count(self, tree: _Tree) -> None:
        """Count the tree as bytes of its session, if the session is still open."""
        with contextlib.suppress(SessionNotFound):
            self._manager.set_attached_bytes(tree.owner, tree.session_id, tree.num_bytes)

    async def _parent(self, tree: _Tree, point: BranchPoint) -> _Node | None:
        """Return the node to continue; end and remove what the request replaces."""
        if point.rid is None:
            if point.replace:
                await self._remove(tree, list(tree.nodes.values()))
            return None
        node = tree.nodes.get(point.rid)
        if node is None:
            raise TurnNotFound("Invalid request session id", param="session_params.rid")
        if point.replace:
            await self._end(tree.owner, node)
            await self._remove(tree, _descendants(tree, node))
        match node.state:
            case NodeState.FINISHED:
                return node
            case NodeState.FAILED:
                raise TurnNotFound("Invalid request session id", param="session_params.rid")
            case NodeState.RUNNING:
                raise SessionBusy(
                    "Session request is appending to a request that hasn't finished.",
                    param="session_params.rid",
                )
            case _:
                assert_never(node.state)

    async def _end(self, owner: Owner, node: _Node) -> None:
        """Cancel a running request, keep its output, and wait until its session is closed."""
        try:
            journal = self._manager.journal(owner, node.session_id)
        except SessionNotFound:
            return
        self._manager.close(owner, node.session_id)
        while not journal.is_closed:
            await journal.wait(journal.last_seq)

    async def _remove(self, tree: _Tree, removed: list[_Node]) -> None:
        for node in removed:
            await self._end(tree.owner, node)
            tree.nodes.pop(node.rid, None)
        self._count(tree)

    def _new_node(
        self, rid: str, parent: _Node | None, point: BranchPoint, new: Sequence[int]
    ) -> _Node:
        base_len = 0
        if parent is not None:
            # As in SGLang: a BOS belongs at the start of the context only.
            if new and new[0] == self._manager.text.bos_token_id:
                new = new[1:]
            if not new:
                raise InvalidRequest(
                    "A session request must contain input tokens after restoring history.",
                    param="input_ids",
                )
            base_len = parent.context_len if point.drop_previous_output else parent.total_len
            if point.offset:
                base_len = len(range(base_len)[: point.offset])
        return _Node(rid, parent, base_len, array("i", new), "")

    async def _ids(self, owner: Owner, turn_input: TurnInput, *, is_first: bool) -> Sequence[int]:
        match turn_input:
            case TokenInput() | TextInput():
                return await self._manager.encode(owner, turn_input, add_bos=is_first)
            case ChatInput() | ContinueInput():
                raise UnsupportedOperation("such a request takes text or token ids")
            case _:
                assert_never(turn_input)


def _descendants(tree: _Tree, root: _Node) -> list[_Node]:
    found = {root}
    for node in tree.nodes.values():
        if node.parent in found:
            found.add(node)
    return list(found - {root})
