"""Every configuration says the same, token by token: overlap, guesses, page, chunk, sharing.

On the device whose answers are a function of all the KV it read, and against a straight replay.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from cache.errors import CacheError
from session_server.engine.config import Drafter, MemoryCheck
from tests.depth import cases
from tests.differential.player import NUM_TOGETHER, SETTINGS, Config, Player
from tests.differential.traces import PlannedSession, Size, make_trace
from tests.mutants import in_books, in_leases, in_radix, in_settling
from tests.mutants.mutant import Mutant
from tests.sim.echo import EOS, VOCAB_SIZE, EchoModel, replay
from tests.sim.hand_engine import HandEngine, Sizes

NUM_TURNS = 1_000
POOL_TOKENS = 192
MAX_CONTEXT_LEN = 128
MODEL = EchoModel(num_repeats=2)
CONFIGS = [Config(*values) for values in cases(*SETTINGS)]


@cache
def trace() -> list[PlannedSession]:
    """The one trace that every configuration plays."""
    return make_trace("s", NUM_TURNS, vocab_size=VOCAB_SIZE, size=Size())


@cache
def expected() -> dict[str, tuple[int, ...]]:
    """What each turn says on an infinite machine, alone."""
    answers = {}
    for session in trace():
        history = session.opening
        for turn in session.turns:
            prompt = history[: len(history) - turn.num_dropped] + turn.tokens
            sampling = turn.sampling
            said = replay(
                "all", prompt, seed=sampling["seed"], max_new=sampling["max_tokens"], model=MODEL
            )
            stops = {*sampling["stop_token_ids"], *(() if sampling["ignore_eos"] else (EOS,))}
            first = next((i + 1 for i, token in enumerate(said) if token in stops), len(said))
            answers[turn.name] = tuple(said[:first][: turn.num_kept])
            history = prompt + answers[turn.name]
    return answers


def play(config: Config, num_sessions: int | None = None) -> Player:
    """The trace (or its beginning) in one configuration, on a pool too small for all of it."""
    sizes = Sizes(
        page_size=config.page_size,
        num_pages=POOL_TOKENS // config.page_size,
        num_rows=NUM_TOGETHER + 2,
        max_context_len=MAX_CONTEXT_LEN,
        max_running=6,
        chunk_tokens=config.chunk_tokens,
        num_in_flight=2 if config.overlap else 1,
        num_drafts=config.num_drafts,
        drafter=Drafter.MODEL,
        memory_check=MemoryCheck.WARN,
    )
    hand = HandEngine.of(sizes, model=MODEL)
    hand.device.assume_salt("all")
    player = Player(config, hand)
    player.play(trace()[:num_sessions])
    return player


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_every_configuration_says_the_same(chunk_tokens: int) -> None:
    reached: Counter[str] = Counter()
    configs = [config for config in CONFIGS if config.chunk_tokens == chunk_tokens]
    for config in configs:
        player = play(config)
        assert player.answers == expected(), config
        assert (player.reached["right guesses"] > 0) == (config.num_drafts > 0)
        reached += player.reached
    assert reached["turns"] == NUM_TURNS * len(configs) > 0
    wanted = {"coolings", "wrong guesses", "overshoots"}
    if chunk_tokens == 64:  # only then do prompts come so fast that answers run out of pages
        wanted.add("retractions")
    assert wanted <= set(reached), reached


@pytest.mark.parametrize(
    ("bug", "config"),
    [
        (in_radix.FIRST_PAGE_IS_ENOUGH, Config(False, 0, 4, 64, share_prefixes=True)),
        (in_books.DELTA_IS_A_VIEW, Config(True, 0, 4, 7, share_prefixes=False)),
        (in_settling.REJECTED_GUESSES_COUNT, Config(False, 4, 16, 64, share_prefixes=False)),
        (in_leases.HISTORY_IS_NOT_CUT, Config(False, 0, 1, 1, share_prefixes=False)),
        (in_leases.CUT_HISTORY_KEEPS_KV, Config(False, 2, 1, 7, share_prefixes=True)),
    ],
)
def test_a_bug_is_seen(bug: Mutant, config: Config) -> None:
    with bug.apply(), pytest.raises((AssertionError, CacheError)):
        check_beginning(config)


def check_beginning(config: Config) -> None:
    """The first sessions of the trace say what they say alone."""
    player = play(config, num_sessions=60)
    assert player.answers == {name: expected()[name] for name in player.answers}
