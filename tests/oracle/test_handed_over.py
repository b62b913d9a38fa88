"""KV that one engine has computed and written is what `transformers` computes of the tokens, in
another engine that reads the files: prefill in one replica, decode in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from session_server.core.commands import (
    CloseSession,
    CoolSession,
    ExpectKV,
    MeasureKV,
    SubmitTurn,
    WriteKV,
)
from session_server.core.events import EngineEvent, KVMeasured, KVWritten
from session_server.core.ids import TurnId
from session_server.core.sampling import SamplingParams
from session_server.engine.engine import StepOutcome
from tests.models.raw_configs import WINDOW
from tests.oracle.house import Guest
from tests.oracle.talks import Reference, Setup, assert_said
from tests.oracle.test_restored import CASES, TieredHouse

NUM_NEW = 3 * WINDOW


class ReplicaHouse(TieredHouse):
    """A house that remembers what its engine has answered."""

    heard: list[EngineEvent]

    def _advance(self, *args: object) -> StepOutcome:
        outcome = super()._advance(*args)  # type: ignore[arg-type]
        self.heard = [*getattr(self, "heard", []), *outcome.events]
        return outcome

    def measured(self, guest: Guest, base_len: int) -> KVMeasured:
        """How much of a guest's tokens needs no computing."""
        tokens = np.array(guest.tokens, "<i4").tobytes()
        ask = MeasureKV(
            request_id=1,
            session_id=guest.id,
            tenant_salt="t",
            tenant="",
            tokens=tokens,
            base_len=base_len,
        )
        self.rest(ask)
        (found,) = (each for each in self.heard if isinstance(each, KVMeasured))
        self.heard.remove(found)
        return found

    def prefill(self, tokens: list[int], cut: int = 0) -> KVWritten:
        """Compute whole pages for another engine, write them and forget the session."""
        page_size = self.cache.spec.page_size
        guest = self.open()
        pages = tuple(tokens[: (len(tokens) - 1) // page_size * page_size])
        greedy = SamplingParams(max_tokens=0, temperature=0.0, seed=0)
        guest.tokens = list(pages)
        turn = SubmitTurn(
            session_id=guest.id,
            turn_id=TurnId(f"{guest.id}/prefill"),
            base_len=0,
            tokens=pages,
            sampling=greedy,
        )
        self.hold([turn])
        self.rest(WriteKV(request_id=2, session_id=guest.id, cut=cut))
        (written,) = (each for each in self.heard if isinstance(each, KVWritten))
        self.heard.remove(written)
        self.rest(CloseSession(session_id=guest.id, is_deleted=False))
        assert written.num_tokens == len(pages)
        assert self.engine.inspect().tiers.store.host.num_bytes == 0
        assert self.engine.inspect().tiers.store.violations() == []
        return written


@pytest.mark.parametrize("setup", CASES, ids=str)
def test_what_another_engine_has_computed_gives_the_same_logits(
    setup: Setup,
    tmp_path: Path,
    checkpoints: Mapping[str, Path],
    references: Mapping[str, Reference],
) -> None:
    prefill = ReplicaHouse(setup, checkpoints[setup.family], tmp_path)
    decode = ReplicaHouse(setup, checkpoints[setup.family], tmp_path)
    page_size = decode.cache.spec.page_size
    guest, num_files = decode.open(), 0
    # First of a session without KV, then of one that is resident, then of one whose beginning is in
    # host memory. Before the last two the files go on where those of the turn before ended.
    for how in ("new", "resident", "spilled"):
        if how == "spilled":
            decode.spill(guest)
        base_len = len(guest.tokens)
        turn = decode.submit(guest, NUM_NEW + page_size, 2)
        measured = decode.measured(guest, base_len)
        assert base_len - 2 * page_size <= measured.held_len <= base_len
        written = prefill.prefill(guest.tokens, cut=measured.copied_len)
        assert len(written.files) > num_files
        num_files = len(written.files)
        before = decode.counts.restored_tokens
        cool = CoolSession(session_id=guest.id, is_ahead_of_turn=True)
        decode.rest(cool, ExpectKV(files=written.files))
        decode.hold([turn])
        num_restored = decode.counts.restored_tokens - before
        assert num_restored >= written.num_tokens - base_len
        assert_said(guest.tokens, guest.said, references[setup.family])
    assert decode.counts.refused_files == decode.counts.failed_copies == 0
    decode.close(guest)
    decode.rest()
    for house in (prefill, decode):
        house.assert_empty()
        assert house.engine.inspect().tiers.store.violations() == []
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"]
