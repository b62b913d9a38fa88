"""Requests that branch: the sessions of SGLang that are not streaming.

Every request is a node named by its `rid`; a later one names the node it goes on from and how
(append, cut at an offset, without the last output, in its place). Each runs as the only turn of a
session of its own with the whole context as input, so that its KV is shared through the radix
tree and nothing here has to know about it. Rules: `Session.create_req` of SGLang's session
controller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never
from weakref import WeakKeyDictionary

from session_server.core.errors import (
    InvalidRequest,
    QuotaExceeded,
    SessionBusy,
    TurnConflict,
    TurnNotFound,
    UnsupportedOperation,
)
from session_server.core.owner import Owner
from session_server.core.session_events import (
    ChatInput,
    TextInput,
    TokenInput,
    TurnCancelled,
    TurnCompleted,
    TurnFailedEntry,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.journal import Journal
from session_server.sessions.manager import SessionManager
from session_server.sessions.views import OpenRequest, TurnView

MAX_NODES: Final = 256
_NUM_LAST: Final = 4
"""The terminal entry of a node's turn is among so many last entries of its journal."""


@dataclass(frozen=True, slots=True)
class BranchPoint:
    """Where a request goes on. `rid` None begins anew.

    `replace`: in place of node `rid`, which is ended, and whose descendants go (all nodes without
    a `rid`). `offset`: the context is cut like a Python slice before the new input; None and 0 do
    not cut. `drop_previous_output`: the context without the output of node `rid`.
    """

    rid: str | None = None
    replace: bool = False
    offset: int | None = None
    drop_previous_output: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """A request under way: a turn in session `session_id`, which closes itself behind it."""

    session_id: str
    view: TurnView
    journal: Journal


@dataclass(slots=True, eq=False)
class _Node:
    """A request: its context, and its output once its session has closed."""

    rid: str
    parent: _Node | None
    context: tuple[int, ...]
    session_id: str
    journal: Journal
    output: tuple[int, ...] | None = None

    def is_finished(self) -> bool:
        """Whether its turn has ended, and left something to go on from."""
        if self.output is None and self.journal.is_closed:
            self.output = _output_of(self.journal)
        return self.output is not None


class RequestTrees:
    """The trees of all such sessions; a session's tree lives as long as its journal."""

    def __init__(self, manager: SessionManager) -> None:
        self._manager = manager
        self._trees: WeakKeyDictionary[Journal, dict[str, _Node]] = WeakKeyDictionary()

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
        # Counts as use of the session, which itself never runs a turn.
        self._manager.update(owner, session_id)
        new = await self._ids(request.input, is_first=point.rid is None)
        nodes = self._trees.setdefault(self._manager.journal(owner, session_id), {})
        parent = await self._parent(owner, nodes, point)
        if rid in nodes:
            raise TurnConflict("a request of this session has that rid", param="rid")
        if len(nodes) >= MAX_NODES:
            raise QuotaExceeded(f"a session has at most {MAX_NODES} requests")
        context = self._context(parent, point, new)
        branch_id = self._manager.open(owner, OpenRequest(single_turn=True)).session_id
        journal = self._manager.journal(owner, branch_id)
        nodes[rid] = _Node(rid, parent, context, branch_id, journal)
        try:
            whole = replace(request, input=TokenInput(context))
            view = await self._manager.submit(owner, branch_id, whole)
        except BaseException:
            nodes.pop(rid, None)
            if not journal.is_closed:
                self._manager.close(owner, branch_id)
            raise
        return Branch(branch_id, view, journal)

    async def _parent(
        self, owner: Owner, nodes: dict[str, _Node], point: BranchPoint
    ) -> _Node | None:
        """The node to go on from; ends and removes what the request replaces."""
        if point.rid is None:
            if point.replace:
                await self._remove(owner, nodes, list(nodes.values()))
            return None
        node = nodes.get(point.rid)
        if node is None:
            raise TurnNotFound("Invalid request session id", param="session_params.rid")
        if point.replace:
            await self._end(owner, node)
            await self._remove(owner, nodes, _descendants(nodes, node))
        if not node.is_finished():
            if node.journal.is_closed:
                raise TurnNotFound("Invalid request session id", param="session_params.rid")
            raise SessionBusy(
                "Session request is appending to a request that hasn't finished.",
                param="session_params.rid",
            )
        return node

    async def _end(self, owner: Owner, node: _Node) -> None:
        """Cancel a request that runs, keeping what it has, and wait until it has let go."""
        if not node.journal.is_closed:
            self._manager.close(owner, node.session_id)
        while not node.journal.is_closed:
            await node.journal.wait(node.journal.last_seq)

    async def _remove(self, owner: Owner, nodes: dict[str, _Node], removed: list[_Node]) -> None:
        for node in removed:
            await self._end(owner, node)
            nodes.pop(node.rid, None)

    def _context(
        self, parent: _Node | None, point: BranchPoint, new: Sequence[int]
    ) -> tuple[int, ...]:
        if parent is None:
            return tuple(new)
        if new and new[0] == self._manager.text.bos_token_id:
            new = new[1:]
        base = parent.context
        if not point.drop_previous_output:
            base += parent.output or ()
        if point.offset:
            base = base[: point.offset]
        context = (*base, *new)
        if not context or not new:
            raise InvalidRequest(
                "A session request must contain input tokens after restoring history.",
                param="input_ids",
            )
        return context

    async def _ids(self, turn_input: TurnInput, *, is_first: bool) -> Sequence[int]:
        match turn_input:
            case TokenInput(token_ids=token_ids):
                return token_ids
            case TextInput(text=text):
                return await self._manager.encode(text, add_bos=is_first)
            case ChatInput():
                raise UnsupportedOperation("such a request takes text or token ids")
            case _:
                assert_never(turn_input)


def _descendants(nodes: dict[str, _Node], root: _Node) -> list[_Node]:
    found = {root}
    for node in nodes.values():  # parents come before their children
        if node.parent in found:
            found.add(node)
    return list(found - {root})


def _output_of(journal: Journal) -> tuple[int, ...] | None:
    """What the only turn of a closed session left, None if it failed."""
    start = max(journal.first_seq - 1, journal.last_seq - _NUM_LAST)
    for found in journal.read(start):
        match found.entry:
            case TurnCompleted(outcome=outcome) | TurnCancelled(outcome=outcome):
                return outcome.token_ids
            case TurnFailedEntry():
                return None
            case _:
                continue
    return None
