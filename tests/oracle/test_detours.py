"""What a session went through leaves no trace: its next turn is what `transformers` computes of its
tokens alone.

Every detour is taken at every residue of the page size, back by less, exactly and more than a
window, by a session that shares the engine with one that goes straight on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from session_server.core.commands import CancelTurn
from tests.depth import at_depth, cases
from tests.models.raw_configs import WINDOW
from tests.oracle.checkpoints import RECURRENT_FAMILIES
from tests.oracle.house import Guest, House
from tests.oracle.talks import Reference, Setup, assert_said

FAMILIES = ("qwen3", "gemma3_text", "mistral_window", "deepseek_v3", *RECURRENT_FAMILIES)
CHUNK = 7
MODES = ((1, False), (4, True), (16, True))
"""Page sizes, and whether launches overlap."""

SHALLOW = 3
DEPTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1)
FIRST_LEN = 2 * WINDOW - 2

Detour = Callable[[House, Guest, int], None]


def cancelled(house: House, guest: Guest, depth: int) -> None:
    """A turn is cut off when it has said `depth` tokens, and nothing of it stays."""
    before = list(guest.tokens)
    turn = house.submit(guest, SHALLOW, depth + 5)
    stop = CancelTurn(turn_id=turn.turn_id, num_outputs=None)
    house.hold([turn], cancel=stop, when=lambda: len(guest.said) >= depth)
    assert guest.tokens == before
    assert len(guest.said) >= depth


def cut(house: House, guest: Guest, depth: int) -> None:
    """A turn is cut off, and `depth` of the tokens it has said do not stay."""
    turn = house.submit(guest, SHALLOW, depth + 5)
    stop = CancelTurn(turn_id=turn.turn_id, num_outputs=1)
    house.hold([turn], cancel=stop, when=lambda: len(guest.said) > depth)
    assert len(guest.said) > depth
    assert len(guest.tokens) == turn.base_len + SHALLOW + 1


def cancelled_in_its_prompt(house: House, guest: Guest, depth: int) -> None:
    """A turn is cut off while its input is computed in chunks."""
    before, last_step = list(guest.tokens), house.num_steps + 2
    turn = house.submit(guest, 2 * CHUNK + depth, 1)
    stop = CancelTurn(turn_id=turn.turn_id, num_outputs=None)
    house.hold([turn], cancel=stop, when=lambda: house.num_steps == last_step)
    assert guest.tokens == before
    assert not guest.said


def rewound(house: House, guest: Guest, depth: int) -> None:
    """A turn goes on from `depth` tokens ago."""
    house.say(guest, SHALLOW, 2, base_len=len(guest.tokens) - depth)


def forked(house: House, guest: Guest, depth: int) -> None:
    """Another session goes on from `depth` tokens ago, and ends."""
    fork = house.open(tuple(guest.tokens[: len(guest.tokens) - depth]))
    house.say(fork, SHALLOW, depth)
    house.close(fork)


def flushed(house: House, guest: Guest, depth: int) -> None:
    """It speaks on, and nothing is left of anybody's KV."""
    house.say(guest, depth, 1)
    house.flush()


def cooled(house: House, guest: Guest, depth: int) -> None:
    """It speaks on, loses its KV, and the tree has some of it."""
    house.say(guest, depth, 1)
    house.cool(guest)


def cooled_and_rewound(house: House, guest: Guest, depth: int) -> None:
    """It loses its KV, and comes back from `depth` tokens ago."""
    house.cool(guest)
    rewound(house, guest, depth)


DETOURS: tuple[Detour, ...] = (
    cancelled,
    cut,
    cancelled_in_its_prompt,
    rewound,
    forked,
    flushed,
    cooled,
    cooled_and_rewound,
)


CASES = [
    (Setup(family, page_size, CHUNK, overlap), detour)
    for family, (page_size, overlap), detour in cases(FAMILIES, MODES, DETOURS)
]


@pytest.mark.parametrize(
    ("setup", "detour"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_after_a_detour_a_session_goes_on_as_if_it_had_taken_none(
    setup: Setup,
    detour: Detour,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    house = House(setup, checkpoints[setup.family])
    lengths = range(FIRST_LEN, FIRST_LEN + setup.page_size)
    places = list(itertools.product(lengths, DEPTHS))
    # Of many, every fifth: every depth, at lengths of every kind; in a proof more.
    step = at_depth(5, proof=1 if setup.page_size < WINDOW else 3) if setup.page_size > 1 else 1
    for length, depth in places[::step]:
        guest, other = house.open(), house.open()
        house.say(guest, length - 1, 1)
        house.say(other, SHALLOW, 1)
        detour(house, guest, depth)
        house.hold([house.submit(speaker, SHALLOW, 2) for speaker in (guest, other)])
        for speaker in (guest, other):
            assert len(speaker.said) == 2
            assert_said(speaker.tokens, speaker.said, references[setup.family])
        house.close(guest, other)
    house.assert_empty()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mistral_window"])
def test_a_retracted_turn_goes_on_as_if_it_never_was(
    family: str,
    page_size: int,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    """Where every layer forgets, a session stops growing: nobody is retracted for the others."""
    pool = 2 * (FIRST_LEN + page_size)
    house = House(Setup(family, page_size, CHUNK, True, pool), checkpoints[family])
    num_retracted = 0
    lengths = range(FIRST_LEN, FIRST_LEN + max(4, page_size))
    # Of many, every second, which are others in the next family; in a proof all of them.
    step = at_depth(2, proof=1)
    for length in lengths[FAMILIES.index(family) % step :: step]:
        guests = [house.open() for _ in range(3)]
        house.hold([house.submit(guest, length - 11, 20) for guest in guests])
        for guest in guests:
            assert_said(guest.tokens, guest.said, references[family])
            num_retracted += guest.num_retractions > 0
        house.close(*guests)
    assert num_retracted > 0, "the pool was never short"
    house.assert_empty()
