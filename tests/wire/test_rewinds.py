"""Whatever was taken back or changed, a session goes on as `transformers` would from what is left.

On every family, from every residue of the page size, back by less, exactly and more than a window.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.models.raw_configs import WINDOW
from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, RECURRENT_FAMILIES
from tests.rig.recovery import assert_books_balance
from tests.wire.conftest import SMALL
from tests.wire.layered_models import write_model
from tests.wire.told_session import ToldSession, assert_said_by, told_session

FIRST_LEN = 2 * WINDOW - 2
DEPTHS = at_depth((WINDOW + 1,), proof=(9, WINDOW - 1, WINDOW, WINDOW + 1))
NUM_NEW = 2
WINDOWED = "gemma3_text"
SERVERS = at_depth(
    [(WINDOWED, 4), (RECURRENT_FAMILIES[0], 4)],
    proof=[*itertools.product((*FAMILIES, *LAYERED_FAMILIES), (4, 16))],
)

Verb = Callable[[ToldSession, int], Awaitable[None]]


async def rewound(session: ToldSession, depth: int) -> None:
    """Ids are read, and taken back."""
    answer = session.items[-1]
    await session.feed(*range(20, 20 + depth))
    await session.rewind(answer)
    await session.feed(9, 10, num_outputs=NUM_NEW)


async def rewound_in_an_exchange(session: ToldSession, depth: int) -> None:
    """An exchange is taken back, and another one takes its place."""
    answer = session.items[-1]
    await exchange(session, depth)
    await session.rewind(answer)
    await session.ask("Or what?", num_outputs=NUM_NEW)


async def asked_again(session: ToldSession, depth: int) -> None:
    """A question is answered again: with the same tokens."""
    await exchange(session, depth)
    await session.rewind(session.items[-2])
    await session.ask(num_outputs=max(1, depth - 8))
    assert session.said[-1].answer == session.said[-2].answer


async def question_edited(session: ToldSession, depth: int) -> None:
    """Another question is answered."""
    await exchange(session, depth)
    await session.edit(session.items[-2], "Another one")
    await session.ask(num_outputs=NUM_NEW)


async def answer_edited(session: ToldSession, depth: int) -> None:
    """The client puts words into the mouth of the model."""
    await exchange(session, depth)
    await session.edit(session.items[-1], "No, that was wrong.")
    await session.ask("Go on", num_outputs=NUM_NEW)


async def forked(session: ToldSession, depth: int) -> None:
    """Another session goes on from an answer, and this one too, from its own end."""
    answer = session.items[-1]
    await exchange(session, depth)
    async with session.fork(answer) as fork:
        await fork.ask("Or what?", num_outputs=NUM_NEW)
        await session.feed(9, num_outputs=NUM_NEW)
        await fork.ask("Really?", num_outputs=NUM_NEW)
    session.said += fork.said


async def exchange(session: ToldSession, depth: int) -> None:
    """A question and its answer, of so many tokens in all or a few more."""
    await session.ask("And?", num_outputs=max(1, depth - 8))


VERBS: tuple[Verb, ...] = (
    rewound,
    rewound_in_an_exchange,
    asked_again,
    question_edited,
    answer_edited,
    forked,
)


@pytest.mark.parametrize(("family", "page_size"), SERVERS)
def test_a_history_that_was_changed_is_gone_on_from(
    family: str, page_size: int, tmp_path: Path
) -> None:
    model = write_model(family, tmp_path)
    flags = [*SMALL, "--model-path", str(model), "--page-size", str(page_size)]
    lengths = range(FIRST_LEN, FIRST_LEN + page_size)
    beginnings = itertools.count(20)  # others than those of all sessions before

    async def one(verb: Verb, length: int, depth: int) -> ToldSession:
        async with told_session(server.url) as session:
            await session.feed(next(beginnings))
            await session.ask("What?", num_outputs=length - 7)
            assert len(session.tokens) == length
            await verb(session, depth)
        return session

    async def scenario() -> None:
        for verb, depth in itertools.product(VERBS, DEPTHS):
            told = await asyncio.gather(*(one(verb, length, depth) for length in lengths))
            for session in told:
                assert_said_by(model, session.said)

    with LocalServer([*flags, "--chunked-prefill-size", "32"]) as server:
        asyncio.run(scenario())
        assert_books_balance(server.url, is_running=False, is_open=False)
        assert server.stop() == 0
