"""Measure our server against peers on the same random weights, over sockets, in turns.

Each row of our types of weights is measured beside the peers' types of the same size, and each
cell is compared with the best of their settings. A peer that is not there is named as not measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from session_server.bench.peers import generating, llama, own
from session_server.bench.peers.cells import CELLS, LLAMA, ROWS, Cell, Scenario, scenarios
from session_server.bench.peers.generating import DTYPES, GeneratingWorker
from session_server.bench.peers.llama import VARIANTS, LlamaServer
from session_server.bench.peers.machine import OtherWork, describe_machine
from session_server.bench.peers.models import (
    BenchModel,
    prepare_gguf,
    prepare_model,
    why_no_gguf,
)
from session_server.bench.peers.ours import OurServer
from session_server.bench.peers.report import PeerSheets, compare, floor_ms
from session_server.bench.peers.rounds import Tokens, all_paused, measure_cell
from session_server.bench.peers.system import System

DEFAULT_WORK_DIR: Final = Path.home() / ".cache" / "session-server" / "bench"

DEFAULT_ROUNDS: Final = 5

SHEETS: Final = (PeerSheets,)


@dataclass(frozen=True, slots=True)
class Available:
    """Say what can be measured here: the path of `llama-server`, whether `transformers` is
    installed, and whether our server has `--quantize`."""

    llama_server: str | None = None
    has_transformers: bool = False
    has_quantize: bool = False


@dataclass(frozen=True, slots=True)
class PeersWorkload:
    """Configure which models, rows and cells are measured, and how often.

    `own`: what to measure of our own sessions; None: nothing.
    """

    models: tuple[str, ...] = ("100m",)
    rows: tuple[str, ...] = ROWS
    cells: tuple[Cell, ...] = CELLS
    num_rounds: int = DEFAULT_ROUNDS
    num_threads: int = 2
    work_dir: Path = DEFAULT_WORK_DIR
    available: Available = Available()
    own: own.OwnWorkload | None = None

    @property
    def total_steps(self) -> int:
        """Return the visits of all systems in all cells, and the steps of our own costs."""
        visits = sum(
            len(scenario.cells) * (1 + num_peers(scenario, row, self.available))
            for row in self.measured_rows
            for scenario in scenarios(self.cells)
        )
        num_own = 0 if self.own is None else self.own.total_steps
        return len(self.models) * self.num_rounds * visits + num_own

    @property
    def measured_rows(self) -> tuple[str, ...]:
        """Return the rows that this build of our server has."""
        return tuple(row for row in self.rows if row != "int8" or self.available.has_quantize)

    def versions(self) -> list[str]:
        """Return the peers that are measured, with their versions. Raises PeerFailed."""
        if not self.models:
            return []
        program, versions = self.available.llama_server, []
        if program is not None:
            versions.append(llama.version(program))
        if self.available.has_transformers:
            versions.append(generating.version())
        return versions

    def not_measured(self) -> Iterator[str]:
        """Yield what is left out, and what to do about it."""
        if self.measured_rows != self.rows:
            yield "int8: this build has no `serve --quantize`"
        if self.models and self.available.llama_server is None:
            yield "llama.cpp: name its server with --llama-server PATH"
        if self.models and not self.available.has_transformers:
            yield "transformers: not installed (pip install 'session-server[peers]')"


def num_peers(scenario: Scenario, row: str, available: Available) -> int:
    """Return how many systems a scenario of a row has besides ours."""
    if scenario.peer == LLAMA:
        return 0 if available.llama_server is None else len(VARIANTS[row])
    return int(available.has_transformers and row in DTYPES)


def measure(load: PeersWorkload, *, on_step: Callable[[], None]) -> dict[str, Any]:
    """Return the figures of all models, rows and cells; call `on_step` after each visit.

    Raises:
        FileNotFoundError: a model is no directory of a checkpoint.
        PeerFailed: a system gave a wrong answer.
        ServerFailed: a system did not start.
    """
    others = OtherWork()
    conditions, versions = describe_machine(load.num_threads), load.versions()
    not_measured = list(load.not_measured())
    models: dict[str, Any] = {}
    for name in load.models:
        model = prepare_model(name, load.work_dir)
        can = load.available
        if can.llama_server is not None and (reason := why_no_gguf(model)) is not None:
            not_measured.append(f"llama.cpp with {model.name}: {reason}")
            can = replace(can, llama_server=None)
        bench = _Bench(model, replace(load, available=can), conditions["dram_gb_per_s"] * 1e9)
        models[model.name] = {row: bench.measure_row(row, on_step) for row in load.measured_rows}
    own_figures = [] if load.own is None else own.measure_own(load.own, on_step=on_step)
    return {
        "num_rounds": load.num_rounds,
        "models": models,
        "own": own_figures,
        "not_measured": not_measured,
        "conditions": conditions | {"peers": versions, "others_share": others.share()},
    }


class _Bench(NamedTuple):
    """Measure one model; memory gives `bytes_per_s`."""

    model: BenchModel
    load: PeersWorkload
    bytes_per_s: float

    def measure_row(self, row: str, on_step: Callable[[], None]) -> dict[str, Any]:
        """Return the comparison of every cell of a row, by its name."""
        load, tokens = self.load, Tokens(self.model.vocab_size)
        sizes = self.model.num_parameters, self.model.kv_values_per_token
        figures: dict[str, Any] = {}
        for scenario in scenarios(load.cells):
            systems = list(self._systems(row, scenario))
            with all_paused(systems):
                for cell in scenario.cells:
                    measured = measure_cell(
                        systems, cell, tokens, num_rounds=load.num_rounds, on_visit=on_step
                    )
                    floor = floor_ms(cell, row, sizes, self.bytes_per_s)
                    figures[cell.name] = compare(cell, asyncio.run(measured), floor=floor)
        return {cell.name: figures[cell.name] for cell in load.cells}

    def _systems(self, row: str, scenario: Scenario) -> Iterator[System]:
        """Yield our server and the peers of a scenario, none of them started."""
        model, load = self.model, self.load
        size = scenario.server_size(load.num_rounds, load.num_threads)
        yield OurServer(model.checkpoint, row, size)
        program = load.available.llama_server
        if scenario.peer == LLAMA and program is not None:
            for variant in VARIANTS[row]:
                yield LlamaServer(program, prepare_gguf(model, variant.weights), variant, size)
        elif scenario.peer != LLAMA and num_peers(scenario, row, load.available):
            yield GeneratingWorker(model.checkpoint, row, size)
