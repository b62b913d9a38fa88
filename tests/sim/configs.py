"""A configuration in which much happens in a short time."""

from __future__ import annotations

from dataclasses import replace

from session_server.engine.config import Drafter, MemoryCheck
from tests.sim.config import Front, Habits, SimConfig
from tests.sim.faults import FaultRates, OneFault
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers

NO_FAULTS = FaultRates()
SIZES = Sizes(
    layers=Layers(),
    page_size=4,
    num_pages=30,
    num_rows=5,
    max_context_len=64,
    chunk_tokens=7,
    max_running=4,
    max_waiting=64,
    num_in_flight=2,
    num_drafts=2,
    drafter=Drafter.NGRAM,
    draft_skill=800,
    num_repeats=3,
    pinned_quota_pages=0,
    allocation="lifo",
    memory_check=MemoryCheck.WARN,
    share_prefixes=True,
)
TIERED_SIZES = replace(SIZES, host_kv_bytes=60_000, disk_kv_bytes=120_000, segment_pages=3)
HABITS = Habits(
    num_sessions=6,
    num_owners=2,
    max_input=20,
    max_new=12,
    shared=500,
    patient=600,
    submit=400,
    open=80,
    cancel=20,
    stop=20,
    close=10,
    misbehave=10,
    rewind=40,
    rewrite=60,
    draft=0,
    cool=0,
    flush=2,
    report=2,
    net=30,
    inline_chars=0,
    journal_entries=100,
    socket_frames=8,
    engine_inbox=48,
)


def rich_config(
    seed: int,
    front: Front,
    *,
    faults: FaultRates = NO_FAULTS,
    only_fault: OneFault | None = None,
    is_tiered: bool = False,
) -> SimConfig:
    """Clients that do a little of everything, a pool that does not hold all, drafts, chunks, and
    text that is always tokenized aside. `is_tiered`: host memory and a disk hold a part of it."""
    return SimConfig(
        seed=seed,
        front=front,
        num_ops=600,
        audit_every=8,
        sizes=TIERED_SIZES if is_tiered else SIZES,
        habits=replace(HABITS, cool=100) if is_tiered else HABITS,
        faults=faults,
        only_fault=only_fault,
    )
