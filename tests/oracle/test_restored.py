"""KV that was copied out of the pools and back is what `transformers` computes of the tokens: from
host memory, and from files in an engine that has just started.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cache.session_cache import SessionAwareCache
from session_server.core.batch import StepResult
from session_server.core.commands import CoolSession, EngineCommand, Shutdown
from session_server.core.tier_orders import TierResult
from session_server.engine.config import TierPolicy
from session_server.engine.engine import Engine, StepOutcome
from session_server.engine.tiers.counts import TierCounts
from session_server.kv_tiers import layout_of
from session_server.runner.kv_carrier import KvCarrier
from session_server.runner.segment_files import SegmentFiles
from tests.depth import at_depth, cases
from tests.models.raw_configs import WINDOW
from tests.oracle.checkpoints import RECURRENT_FAMILIES
from tests.oracle.device import DEVICE
from tests.oracle.house import Guest, House
from tests.oracle.talks import Reference, Setup, assert_said, load, settings_of

FAMILIES = ("qwen3", "gemma3_text", "mistral_window", "deepseek_v3", *RECURRENT_FAMILIES)
MODES = ((1, False), (4, True), (16, True))
CHUNK = 7
SHALLOW = 3
MIB = 1 << 20


class TieredHouse(House):
    """A house whose engine keeps KV in host memory and in files; every copy is made at once."""

    def __init__(
        self, setup: Setup, directory: Path, files: Path, fingerprint: str = "oracle"
    ) -> None:
        super().__init__(setup, directory)
        loaded = load(setup, directory)
        self.carrier = KvCarrier(
            loaded.runner.paged_tensors(),
            SegmentFiles(files, layout_of(loaded, fingerprint)),
            is_pinned=DEVICE.type == "cuda",
        )
        tiers = TierPolicy(64 * MIB, 64 * MIB, page_bytes=self.carrier.page_bytes)
        self.cache = SessionAwareCache(loaded.spec, loaded.plan.capacity)
        self.runner, self.engine = loaded.runner, Engine(self.cache, settings_of(setup, tiers))
        self._copied: list[TierResult] = []
        self.rest()

    @property
    def counts(self) -> TierCounts:
        """What was copied."""
        return self.engine.inspect().tiers.store.counts

    def rest(self, *commands: EngineCommand) -> None:
        """Carry out commands, and every copy that comes of them."""
        self._step(list(commands))
        while self._copied:
            self._step([])

    def spill(self, guest: Guest) -> None:
        """Take a session's KV out of the pools, and whatever nobody uses."""
        self.rest(CoolSession(session_id=guest.id))
        stores = self.cache.inspect().stores
        for pool, ledger in stores.ledgers.items():
            stores.evict(pool, ledger.num_evictable)
        assert self.cache.peek(self.cache.tokens(guest.id), self._namespace(guest)).matched_len == 0

    def _namespace(self, guest: Guest) -> object:
        return self.cache.slot(guest.id).namespace

    def _advance(self, commands: list[EngineCommand], results: list[StepResult]) -> StepOutcome:
        copied, self._copied = self._copied, []
        now_s = self.num_steps * 0.01
        outcome = self.engine.step(now_s, commands, results, copied=copied)
        for order in outcome.orders:
            if (result := self.carrier.prepare(order).run()) is not None:
                self._copied.append(result)
        return outcome


CASES = [
    Setup(family, page_size, CHUNK, overlap)
    for family, (page_size, overlap) in cases(FAMILIES, MODES)
]


def lengths_of(setup: Setup) -> range:
    """Histories around a window's edge, at every residue of the page size."""
    first = max(WINDOW - 1, 2 * setup.page_size)
    return range(first, first + setup.page_size + 2, 1 if setup.page_size < WINDOW else 3)


@pytest.mark.parametrize("setup", CASES, ids=str)
def test_what_comes_back_from_host_memory_gives_the_same_logits(
    setup: Setup,
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    house = TieredHouse(setup, checkpoints[setup.family], tmp_path)
    for length in lengths_of(setup):
        guest = house.open()
        house.say(guest, length - 1, 1)
        house.spill(guest)
        before = house.counts.restored_tokens
        house.say(guest, SHALLOW, 2)
        assert house.counts.restored_tokens - before >= (length - 1) // setup.page_size - 1
        assert_said(guest.tokens, guest.said, references[setup.family])
        house.close(guest)
    assert house.counts.failed_copies == 0
    house.assert_empty()


@pytest.mark.parametrize("setup", CASES, ids=str)
def test_what_comes_back_from_files_gives_the_same_logits(
    setup: Setup,
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    lengths = list(lengths_of(setup))[:: at_depth(3, proof=1)]
    first = TieredHouse(setup, checkpoints[setup.family], tmp_path)
    guests = []
    for length in lengths:
        guest = first.open()
        first.say(guest, length - 1, 1)
        guests.append(guest)
    first.rest(Shutdown())
    assert first.engine.has_shut_down
    again = TieredHouse(setup, checkpoints[setup.family], tmp_path)
    for guest in guests:
        back = again.open(tuple(guest.tokens))
        again.say(back, SHALLOW, 2)
        assert_said(back.tokens, back.said, references[setup.family])
        again.spill(back)
        again.say(back, SHALLOW, 2)
        assert_said(back.tokens, back.said, references[setup.family])
    assert again.counts.restored_tokens >= sum(n - 2 * setup.page_size for n in lengths)
    assert again.counts.refused_files == again.counts.failed_copies == 0
