"""What one simulation is like: sizes of the engine, habits of clients, how much goes wrong.

The seed draws all of it (swarm testing, Groce et al. 2012): a run in which nothing is ever
cancelled, or everything is, reaches states that an average run does not.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from cache.capacity import BoundedPools
from cache.tiers.segment_tree import SEGMENT_BYTES
from session_server.engine.config import Drafter, MemoryCheck
from tests.sim.draws import Draws
from tests.sim.faults import FaultRates, OneFault, Site
from tests.sim.hand_engine import Sizes
from tests.sim.layers import Layers, Mixture

FIRST_DRAFTING: Final = 10**9
"""The first of the seeds whose clients draft."""

FIRST_TIERED: Final = 2 * 10**9
"""The first of the seeds whose engine keeps KV outside of its pools; its clients may draft."""

FIRST_OF_STATES: Final = 3 * 10**9
"""The first of the seeds whose model keeps states, and whose turns need as many as they may have:
long prompts with common beginnings, in forwards that fail."""

STATES_AT_REST: Final = 2
"""Of a session: at its length, and a snapshot at what it has published."""


_SEGMENT_BYTES: Final = 2 * SEGMENT_BYTES
"""About what a segment of the simulated model takes."""


class Front(enum.StrEnum):
    """What stands before the engine: commands made up on the spot, or the whole server with
    clients on sockets."""

    DIRECT = "direct"
    WIRE = "wire"


@dataclass(frozen=True, slots=True)
class Habits:
    """Clients. Rates are weights among the operations; `shared` is per mille of prompts that begin
    like another session's, `patient` per mille of moments at which only the device moves.
    `inline_chars`, `journal_entries`: limits of sessions; `socket_frames`: see `Socket`;
    `engine_inbox`: see `HostedEngine`.
    """

    num_sessions: int
    num_owners: int
    max_input: int
    max_new: int
    shared: int
    patient: int
    submit: int
    open: int
    cancel: int
    stop: int
    close: int
    misbehave: int
    rewind: int
    rewrite: int
    draft: int
    cool: int
    flush: int
    report: int
    net: int
    inline_chars: int
    journal_entries: int
    socket_frames: int
    engine_inbox: int


@dataclass(frozen=True, slots=True)
class SimConfig:
    """One simulation. `audit_every`: engine steps between two full recounts. `only_fault`: what
    goes wrong in place of what `faults` says.
    """

    seed: int
    front: Front
    num_ops: int
    audit_every: int
    sizes: Sizes
    habits: Habits
    faults: FaultRates
    only_fault: OneFault | None = None


def draw_config(seed: int) -> SimConfig:
    """What the simulation of this seed is like. From `FIRST_DRAFTING` on clients draft, and every
    second seed has the whole server: the seeds before say what they always said."""
    draws = Draws(seed)
    is_drafting = FIRST_DRAFTING <= seed < FIRST_OF_STATES
    is_tiered = FIRST_TIERED <= seed < FIRST_OF_STATES
    front = Front.DIRECT if draws.below("front", 2 if is_drafting else 8) else Front.WIRE
    config = SimConfig(
        seed=seed,
        front=front,
        num_ops=draws.pick("num_ops", (200, 600, 1500)),
        audit_every=draws.pick("audit_every", (1, 16, 16, 16, *(64,) * 60)),
        sizes=_draw_sizes(draws, is_drafting=is_drafting, is_tiered=is_tiered),
        habits=_draw_habits(draws, is_drafting=is_drafting, is_tiered=is_tiered),
        faults=_draw_faults(draws, front, is_tiered=is_tiered),
    )
    if seed >= FIRST_OF_STATES:
        return _crowded_with_states(config, draws)
    return draws.pick("shape", _SHAPES)(config, draws) if is_tiered else config


def _returning(config: SimConfig, draws: Draws) -> SimConfig:
    """Engines that end again and again, over a disk that is never emptied: sessions come back, and
    find their beginnings in files that others share with them."""
    disk_kv_bytes = draws.pick("disk that stays", (8, 30, 200)) * _SEGMENT_BYTES
    engine_death = draws.pick("rate of returns", (5, 15))
    habits, faults = config.habits, config.faults
    return replace(
        config,
        front=Front.DIRECT,
        num_ops=1500,
        sizes=replace(config.sizes, disk_kv_bytes=disk_kv_bytes),
        habits=replace(habits, flush=0, shared=max(habits.shared, 900), close=24),
        faults=replace(faults, engine_death=engine_death, quarantine=0, rebuild=0),
    )


def _crowded(config: SimConfig, draws: Draws) -> SimConfig:
    """One session alone has more than host memory and disk hold, in segments of a page each, and
    engines that end have hardly time or room to write."""
    sizes = replace(
        config.sizes,
        host_kv_bytes=draws.pick("memory", (2, 6, 60)) * _SEGMENT_BYTES,
        disk_kv_bytes=draws.pick("little disk", (3, 8)) * _SEGMENT_BYTES,
        segment_pages=1,
        drain_s=draws.pick("little time", (0.02, 0.1, 10.0)),
    )
    engine_death = draws.pick("rate of ends", (0, 10, 20))
    faults = replace(config.faults, engine_death=engine_death, rebuild=10)
    return replace(config, front=Front.DIRECT, sizes=sizes, faults=faults)


def _crowded_with_states(config: SimConfig, draws: Draws) -> SimConfig:
    """Prompts of several chunks beside each other, which begin alike, and forwards that fail."""
    num_rows = draws.pick("rows with states", (3, 4, 6, 9))
    num_drafts = draws.pick("drafts", (0, 0, 1, 2, 4))
    few_states = _few_states(num_rows, config.sizes.max_running, num_drafts)
    num_states = draws.pick("states", (None, few_states))
    sizes = replace(
        config.sizes,
        layers=Layers(Mixture.FULL_AND_RECURRENT, num_states=num_states),
        page_size=draws.pick("short pages", (2, 3, 4, 5)),
        num_pages=400,
        num_rows=num_rows,
        max_context_len=200,
        chunk_tokens=draws.pick("chunk", (2, 3, 5, 13, 16, 23, 32, 41, 64)),
        num_in_flight=2,
        num_drafts=num_drafts,
    )
    habits = replace(
        config.habits,
        num_sessions=9,
        max_input=draws.pick("long input", (20, 60, 90)),
        shared=900,
        submit=800,
        close=8,
        misbehave=0,
    )
    device_raise = draws.pick("rate of failures", (15, 40, 120))
    faults = replace(config.faults, device_raise=device_raise, alloc_page=0)
    return replace(config, front=Front.DIRECT, sizes=sizes, habits=habits, faults=faults)


def _as_drawn(config: SimConfig, draws: Draws) -> SimConfig:
    del draws
    return config


_SHAPES: Final = (*[_as_drawn] * 3, *[_returning] * 3, _crowded, _crowded)
"""Lives whose engine keeps KV outside of its pools."""


def to_json(config: SimConfig) -> dict[str, Any]:
    """A configuration as plain values."""
    return {name: _plain(value) for name, value in dataclasses.asdict(config).items()}


def from_json(plain: Mapping[str, Any]) -> SimConfig:
    """A configuration from what `to_json` made.

    Raises:
        KeyError, TypeError, ValueError: it is of another version, or was edited wrongly.
    """
    sizes = dict(plain["sizes"])
    layers = dict(sizes["layers"])
    layers["mixture"] = Mixture(layers["mixture"])
    sizes["layers"] = Layers(**layers)
    sizes["drafter"] = Drafter(sizes["drafter"])
    sizes["memory_check"] = MemoryCheck(sizes["memory_check"])
    only = plain["only_fault"]
    return SimConfig(
        seed=plain["seed"],
        front=Front(plain["front"]),
        num_ops=plain["num_ops"],
        audit_every=plain["audit_every"],
        sizes=Sizes(**sizes),
        habits=Habits(**plain["habits"]),
        faults=FaultRates(**plain["faults"]),
        only_fault=OneFault(Site(only["site"]), only["nth"]) if only else None,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def _draw_sizes(draws: Draws, *, is_drafting: bool, is_tiered: bool) -> Sizes:
    num_pages = draws.between("num_pages", 18, 96)
    page_size = draws.pick("page_size", (1, 2, 4, 4, 16))
    chunk_tokens = draws.pick("chunk_tokens", (1, 2, 3, 5, 7, 8, 13, 16, 32, 64))
    allocations: tuple[Literal["lifo", "extent"], ...] = ("lifo", "lifo", "extent")
    checks = (MemoryCheck.OFF, MemoryCheck.OFF, MemoryCheck.WARN)
    num_rows = draws.pick("num_rows", (2, 3, 5, 9, 12))
    max_running = draws.between("max_running", 1, 8)
    num_drafts = draws.pick("num_drafts", (0, 2, 4))
    return Sizes(
        layers=_draw_layers(
            draws,
            page_size=page_size,
            chunk_tokens=chunk_tokens,
            # A session whose next turn is drafted may hold as many as one that runs.
            few_states=_few_states(num_rows, num_rows if is_drafting else max_running, num_drafts),
        ),
        page_size=page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        max_context_len=draws.between("max_context_len", 24, 96),
        chunk_tokens=chunk_tokens,
        max_running=max_running,
        max_waiting=draws.pick("max_waiting", (64, 64, 64, 1, 3)),
        num_in_flight=draws.pick("num_in_flight", (1, 2, 2, 2)),
        num_drafts=num_drafts,
        drafter=draws.pick("drafter", (Drafter.NGRAM, Drafter.MODEL)),
        draft_skill=draws.pick("draft_skill", (300, 800, 950)),
        num_repeats=draws.pick("num_repeats", (0, 2, 3, 4)),
        pinned_quota_pages=draws.pick("pinned_quota_pages", (0, 0, num_pages // 3)),
        allocation=draws.pick("allocation", allocations),
        memory_check=draws.pick("memory_check", checks),
        share_prefixes=draws.pick("share_prefixes", (True, True, False)),
        host_kv_bytes=draws.pick("host", (2, 6, 14, 60)) * _SEGMENT_BYTES if is_tiered else 0,
        disk_kv_bytes=draws.pick("disk", (0, 3, 8, 30, 200)) * _SEGMENT_BYTES if is_tiered else 0,
        segment_pages=draws.pick("segment_pages", (1, 3, 64)) if is_tiered else 64,
        drain_s=draws.pick("drain_s", (0.05, 0.2, 10.0)) if is_tiered else 10.0,
    )


def _draw_layers(draws: Draws, *, page_size: int, chunk_tokens: int, few_states: int) -> Layers:
    """Every second model has full attention alone. Beside it a pool of windows is as large as its
    own, or holds hardly one long turn, and a pool of states has all that rows may ever hold, or
    `few_states`."""
    others = [mixture for mixture in Mixture if mixture is not Mixture.FULL]
    kind = draws.below("mixture", 4 * len(others))
    if kind >= 2 * len(others):
        return Layers()
    mixture = others[kind // 2]
    if mixture is Mixture.FULL_AND_RECURRENT:
        num_states = draws.pick("state pool", (None, few_states))
        return Layers(mixture, num_states=num_states)
    window = draws.pick("window", (2, 3, 5, 8, 13, 24))
    one_turn = (3 * window + 2 * chunk_tokens) // page_size
    tight = one_turn + draws.between("window_pages", 2, 18)
    window_pages = draws.pick("window pool", (None, tight, tight))
    return Layers(mixture, window, window_pages if mixture is Mixture.FULL_AND_WINDOW else None)


def _few_states(num_rows: int, max_running: int, num_drafts: int) -> int:
    """As many as turns may hold that run and sessions that rest."""
    num_running = min(num_rows, max_running)
    num_resting = num_rows - num_running
    per_turn = BoundedPools(num_drafts=num_drafts).states_per_row
    return num_running * per_turn + num_resting * STATES_AT_REST


def _draw_habits(draws: Draws, *, is_drafting: bool, is_tiered: bool) -> Habits:
    def rate(site: str, *weights: int) -> int:
        return draws.pick(site, weights)

    return Habits(
        num_sessions=draws.between("num_sessions", 2, 9),
        num_owners=draws.between("num_owners", 1, 3),
        max_input=draws.pick("max_input", (3, 8, 20, 60)),
        max_new=draws.pick("max_new", (4, 12, 40, 60)),
        shared=draws.pick("shared", (0, 500, 900, 1000)),
        patient=draws.pick("patient", (600, 800, 900, 950)),
        submit=rate("submit", 200, 400),
        open=rate("open", 40, 80) if not is_tiered else 20,
        cancel=rate("cancel", 0, 40, 200),
        stop=rate("stop", 0, 20, 80),
        close=rate("close", 0, 16, 64) if not is_tiered else rate("close", 0, 8, 24),
        misbehave=rate("misbehave", 0, 10, 60),
        rewind=rate("rewind", 0, 20, 60),
        rewrite=rate("rewrite", 0, 0, 100, 300),
        draft=rate("draft", 100, 400, 1600) if is_drafting else 0,
        cool=rate("cool", 100, 400, 1600) if is_tiered else 0,
        flush=rate("flush", 0, 2, 20),
        report=rate("report", 0, 2, 10),
        net=rate("net", 0, 30, 120),
        inline_chars=draws.pick("inline_chars", (4, 4, 4096)),
        journal_entries=draws.pick("journal_entries", (64, 100, 1000)),
        socket_frames=draws.pick("socket_frames", (2, 2, 8, 64)),
        engine_inbox=draws.pick("engine_inbox", (3, 8, 48)),
    )


def _draw_faults(draws: Draws, front: Front, *, is_tiered: bool) -> FaultRates:
    def rate(site: str, *per_mille: int) -> int:
        return draws.pick(f"rate of {site}", (0, 0, *per_mille))

    is_wire = front is Front.WIRE
    return FaultRates(
        device_nan=rate("device_nan", 3, 15),
        device_raise=rate("device_raise", 3, 15),
        device_poison=rate("device_poison", 3, 15),
        alloc_page=rate("alloc_page", 20, 100),
        alloc_row=rate("alloc_row", 20, 100),
        engine_death=rate("engine_death", 3, 10) if is_wire or is_tiered else 0,
        net_drop=rate("net_drop", 10, 40) if is_wire else 0,
        net_stall=rate("net_stall", 20, 60) if is_wire else 0,
        tokenizer_slow=rate("tokenizer_slow", 200, 500) if is_wire else 0,
        eviction=draws.pick("rate of eviction", (0, 100, 300, 800)) if is_tiered else 0,
        quarantine=rate("quarantine", 2, 10) if is_tiered else 0,
        rebuild=rate("rebuild", 2, 10) if is_tiered else 0,
        tier_copy=rate("tier_copy", 20, 200) if is_tiered else 0,
        tier_file=rate("tier_file", 20, 200) if is_tiered else 0,
        tier_room=rate("tier_room", 100, 500) if is_tiered else 0,
    )
