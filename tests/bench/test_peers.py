"""The comparison with peers: what is chosen, compared and written, and our own server measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.peers import benchmark, flags, llama, models, page, report
from session_server.bench.peers.cells import (
    CELLS,
    LLAMA,
    ROWS,
    TRANSFORMERS,
    Cell,
    Figure,
    figure_of,
    scenarios,
)
from session_server.bench.peers.llama import VARIANTS
from session_server.bench.peers.machine import OtherWork, instruction_sets, read_bandwidth
from session_server.bench.peers.ours import open_conversation
from session_server.bench.peers.own import OwnWorkload, measure_own
from session_server.bench.peers.system import PeerFailed, TurnTrace, pause, resume
from session_server.local_server import LocalServer
from tests.depth import IS_PROOF

LLAMA_SERVER = os.environ.get("LLAMA_SERVER")
SHAPE = RandomModel(vocab_size=1700, max_position_embeddings=512)
DECODE = Cell("decode", Figure.STEP_MS, 2, 0, 1, 1, 8, 1.0)
LONG_DECODE = Cell("decode", Figure.STEP_MS, 2, 0, 1, 1, 96, 1.0)
"""Enough tokens that a loaded machine does not hand over all of a turn at once."""
TURNS = Cell("turns", Figure.TURNS_PER_S, 2, 40, 2, 8, 4, 1.3)
REQUESTS = Cell("requests", Figure.TOKENS_PER_S, 2, 0, 1, 8, 8, 10.0, peer=TRANSFORMERS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("peers") / "tiny", SHAPE)


# What is measured.


def test_the_goals_are_those_of_the_performance_design() -> None:
    goals = {cell.name: cell.goal for cell in CELLS}
    assert [goals[f"decode, batch {batch} on 0, ms"] for batch in (1, 4, 8)] == [1.0] * 3
    assert [goals[f"decode, batch {batch} on 2,048, ms"] for batch in (1, 4, 8)] == [
        1.1,
        1.3,
        1.3,
    ]
    assert [goals[f"TTFT, 64 new on {n}, ms"] for n in ("0", "1,024", "4,096")] == [1.0, 1.2, 1.5]
    assert goals["8 x 20 turns of 16 / 8, turns/s"] == 1.3
    assert goals["16 x 64 / 32 on 2,048, turns/s"] == 1.3
    assert goals["8 requests of 16 / 32, tokens/s"] == 10.0


def test_a_server_is_started_once_for_cells_of_as_many_sessions_and_the_same_peer() -> None:
    grouped = scenarios(CELLS)
    assert sorted(cell.name for group in grouped for cell in group.cells) == sorted(
        cell.name for cell in CELLS
    )
    assert [(group.num_sessions, group.peer) for group in grouped] == [
        *((1, LLAMA), (4, LLAMA), (8, LLAMA), (8, TRANSFORMERS), (16, LLAMA)),
    ]
    histories = [cell.history for cell in grouped[0].cells]
    assert histories == sorted(histories)
    assert grouped[0].server_size(3, 2).context_len == 4096 + 3 * 65 + 32


def test_a_kept_conversation_grows_in_every_round_and_a_new_one_does_not() -> None:
    assert TURNS.context_len(5) - TURNS.context_len(4) == 2 * (8 + 4)
    assert DECODE.context_len(5) == DECODE.context_len(4)


def test_every_row_has_variants_of_llama_cpp_with_weights_that_we_write() -> None:
    assert set(VARIANTS) == set(ROWS)
    weights = {variant.weights for row in VARIANTS.values() for variant in row}
    assert weights == set(models.GGUF_TYPES)


# What is made of it.


def trace(begun_s: float, *arrivals: tuple[float, int]) -> TurnTrace:
    return TurnTrace(begun_s, arrivals)


def test_a_step_is_timed_while_all_conversations_generate() -> None:
    slow_alone = trace(0.0, (0.5, 1), (1.0, 1), (1.1, 1), (1.2, 1), (9.0, 1))
    later = trace(0.0, (1.0, 1), (1.1, 1), (1.2, 1))
    assert figure_of(Figure.STEP_MS, [[slow_alone], [later]]) == pytest.approx(100)


def test_tokens_that_arrive_as_one_share_the_time() -> None:
    assert figure_of(Figure.STEP_MS, [[trace(0.0, (1.0, 1), (1.3, 3))]]) == pytest.approx(100)


def test_turns_and_tokens_are_counted_from_the_first_request_to_the_last_token() -> None:
    turns = [[trace(1.0, (1.5, 4)), trace(2.0, (3.0, 4))], [trace(1.0, (2.0, 4))]]
    assert figure_of(Figure.TURNS_PER_S, turns) == pytest.approx(3 / 2)
    assert figure_of(Figure.TOKENS_PER_S, turns) == pytest.approx(12 / 2)
    assert figure_of(Figure.TTFT_MS, turns) == pytest.approx(1000)


def test_a_time_is_compared_with_the_shortest_of_the_peers() -> None:
    rounds = {"ours": [9.0, 10.0, 30.0], "slow": [30.0] * 3, "fast": [5.0, 12.0, 13.0]}
    compared = report.compare(DECODE, rounds, floor=None)
    assert (compared["ours"], compared["best"], compared["theirs"]) == (10.0, "fast", 12.0)
    assert compared["ratio"] == pytest.approx(1.2)
    assert compared["met"]


def test_a_rate_is_compared_with_the_highest_of_the_peers() -> None:
    compared = report.compare(TURNS, {"ours": [24.0], "a": [20.0], "b": [10.0]}, floor=None)
    assert compared["best"] == "a"
    assert compared["ratio"] == pytest.approx(1.2)
    assert not compared["met"]


def test_without_a_peer_nothing_is_met_or_missed() -> None:
    compared = report.compare(DECODE, {"ours": [10.0]}, floor=None)
    assert compared["ours"] == 10.0
    assert {compared[key] for key in ("best", "theirs", "ratio", "met")} == {None}


def test_the_floor_is_what_reading_weights_and_kv_takes() -> None:
    kept = Cell("", Figure.STEP_MS, 1, 2048, 1, 1, 32, 1.1)
    sizes = (100_000_000, 6144)
    assert report.floor_ms(kept, "float32", sizes, 1e9) == pytest.approx(400 + 50.33, abs=0.01)
    assert report.floor_ms(kept, "bfloat16", sizes, 1e9) == pytest.approx(200 + 25.17, abs=0.01)
    assert report.floor_ms(DECODE, "float32", sizes, 1e9) is None


# The models.


def test_the_named_models_have_the_sizes_of_their_names() -> None:
    def count(shape: RandomModel) -> int:
        heads = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
        layer = shape.hidden_size * (heads + 3 * shape.intermediate_size)
        assert shape.vocab_size is not None
        return shape.vocab_size * shape.hidden_size + shape.num_hidden_layers * layer

    assert count(models.SHAPES["100m"]) == pytest.approx(100e6, rel=0.01)
    assert count(models.SHAPES["0.6b"]) == pytest.approx(0.596e9, rel=0.01)


def test_a_named_model_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SHAPES", {"tiny": SHAPE})
    first = models.prepare_model("tiny", tmp_path)
    written = (first.checkpoint / "model.safetensors").stat().st_mtime_ns
    assert models.prepare_model("tiny", tmp_path) == first
    assert (first.checkpoint / "model.safetensors").stat().st_mtime_ns == written
    assert first.vocab_size == 1700
    assert first.num_parameters == 1700 * 128 + 128 + 2 * (2 * 128 * 192 + 3 * 128 * 256 + 320)
    assert first.kv_values_per_token == 2 * 2 * 2 * 32


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nor a directory with a config"):
        models.prepare_model(str(tmp_path), tmp_path)


def test_transformers_continues_as_our_server_does_with_the_larger_vocabulary(
    checkpoint: Path,
) -> None:
    prompt = [300 + 37 * i % 1400 for i in range(24)]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    continued = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
    )

    async def ours(url: str) -> list[int]:
        conversation = await open_conversation(url)
        await conversation.turn(prompt, 12)
        await conversation.close()
        return list(conversation.last_end["item"]["token_ids"])

    with LocalServer(["--model-path", str(checkpoint), "--log-level", "warning"]) as server:
        assert asyncio.run(ours(server.url)) == continued[0, len(prompt) :].tolist()


@pytest.mark.parametrize("gguf_type", models.GGUF_TYPES)
def test_gguf_has_the_same_weights(checkpoint: Path, tmp_path: Path, gguf_type: str) -> None:
    model = models.BenchModel("tiny", checkpoint, tmp_path)
    assert models.why_no_gguf(model) is None
    path = models.prepare_gguf(model, gguf_type)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    weights = load_file(checkpoint / "model.safetensors")
    assert set(stored) == {models.gguf_name(name) for name in weights}
    for name, weight in weights.items():
        tensor = stored[models.gguf_name(name)]
        kind = "F32" if weight.ndim == 1 else gguf_type
        assert tensor.tensor_type.name == kind
        read = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(weight.shape)
        match kind:
            case "F32":
                assert np.array_equal(read, weight.numpy())
            case "BF16":
                assert np.array_equal(read, weight.bfloat16().float().numpy())
            case "F16":
                assert np.array_equal(read, weight.half().float().numpy())
            case _:
                block = np.abs(weight.numpy().reshape(-1, 32)).max(axis=1, keepdims=True)
                error = np.abs(read - weight.numpy()).reshape(-1, 32)
                assert (error <= block / 127 * 0.51 + 1e-4).all()


def test_gguf_of_halves_is_that_of_their_values(checkpoint: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    halves = {name: weight.bfloat16() for name, weight in weights.items()}
    save_file(halves, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    path = models.prepare_gguf(models.BenchModel("halves", tmp_path, tmp_path), "F32")
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "token_embd.weight":
            read = tensor.data.reshape(1700, 128)
            assert np.array_equal(read, halves["model.embed_tokens.weight"].float().numpy())


def test_another_family_is_not_written_as_gguf(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    reason = models.why_no_gguf(models.BenchModel("other", tmp_path, tmp_path))
    assert reason == "it is not a dense Qwen3 model, and no other is written as GGUF"


# The machine.


def test_a_paused_process_stands_still_with_its_children() -> None:
    spin = "while True: pass"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
    process = subprocess.Popen([sys.executable, "-c", start], start_new_session=True)

    def command(pid: int) -> str:
        return Path(f"/proc/{pid}/cmdline").read_text()

    def states(*pids: int) -> set[str]:
        stats = (Path(f"/proc/{pid}/stat").read_text() for pid in pids)
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    try:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # Between fork and exec the child still has its parent's command, and holds it up.
        while not (child := int(listed.read_text() or 0)) or "subprocess" in command(child):
            time.sleep(0.01)
        pause(process.pid)
        while states(process.pid, child) != {"T"}:
            time.sleep(0.01)
        resume(process.pid)
        while "T" in states(process.pid, child):
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_machine_is_described_by_what_decides_its_speed() -> None:
    assert instruction_sets("flags\t\t: fpu avx2 sse2 avx512f\n") == ["avx2", "avx512f"]
    assert instruction_sets("Features\t: fp asimd sve\n") == ["asimd", "sve"]
    assert instruction_sets("") == []
    assert read_bandwidth(1) > 1e8
    assert 0.0 <= OtherWork().share() <= 1.0


@pytest.mark.parametrize(
    ("says", "version"), [("version: 9 (abc)", "llama.cpp 9"), ("usage: ...", "llama.cpp")]
)
def test_a_peer_is_named_with_its_version(tmp_path: Path, says: str, version: str) -> None:
    program = tmp_path / "llama-server"
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    assert llama.version(str(program)) == version


def test_a_peer_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="absent does not run"):
        llama.version(str(tmp_path / "absent"))


# The report.


def tiny_report() -> dict[str, Any]:
    cell = report.compare(DECODE, {"ours": [10.0], "llama.cpp f32": [12.0]}, floor=8.0)
    alone = report.compare(TURNS, {"ours": [20.0]}, floor=None)
    return {
        "num_rounds": 3,
        "models": {"100m": {"float32": {"decode": cell, "turns": alone}}},
        "own": [{"name": "held", "value": 1.004, "bound": "<=", "goal": 1.01, "met": True}],
        "not_measured": ["transformers: not installed"],
        "conditions": {
            **{"date": "2026-11-27", "cores": 2, "processor": "x86_64", "l3": "32768K"},
            **{"instruction_sets": ["avx2"], "dram_gb_per_s": 34.4, "threads": 2},
            **{"python": "3.11.7", "peers": ["llama.cpp 0.5.0"], "others_share": 0.01},
        },
    }


def test_the_marked_section_of_a_page_is_written_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.write_section(path, tiny_report(), "session-server bench peers")
    once = path.read_text()
    assert once.startswith(f"before\n{page.BEGIN}\n")
    assert once.endswith(f"{page.END}\nafter\n")
    assert "old" not in once
    assert "| decode | 10 | 12 | 1.20x | 1.0x met | 8 | llama.cpp f32 |" in once
    assert "| turns | 20 | - | - | 1.3x | - | not measured |" in once
    assert "| held | 1.004 | <= 1.01 | met |" in once
    assert "* Not measured: transformers: not installed" in once
    assert "2 cores of x86_64 (avx2), L3 32768K, DRAM read 34 GB/s" in once
    assert "2 threads, Python 3.11.7, llama.cpp 0.5.0, medians" in once
    page.write_section(path, tiny_report(), "session-server bench peers")
    assert path.read_text() == once


@pytest.mark.parametrize("text", ["", page.BEGIN, f"{page.END}\n{page.BEGIN}"])
def test_a_page_without_a_section_is_refused_before_anything_is_measured(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(page.NoSection, match="needs one section"):
        page.check_page(tmp_path / "page.md")


def test_ratios_are_drawn(tmp_path: Path) -> None:
    page.plot_ratios(tiny_report(), tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 1000


def test_the_command_of_a_page_names_no_path_of_this_machine() -> None:
    given = dict.fromkeys(flags.NAMES) | {
        **{"llama_server": "/somewhere/llama-server", "model": ["100m", "/models/mine/"]},
        **{"short": True, "markdown": Path("docs/benchmarks.md"), "work_dir": Path("/cache")},
    }
    words = "session-server bench peers --model 100m mine --llama-server llama-server --short"
    assert flags.command_of(flags.argparse.Namespace(**given)) == words


# Whole runs.


def run(
    checkpoint: Path,
    tmp_path: Path,
    cells: tuple[Cell, ...],
    *,
    num_rounds: int = 3,
    **available: Any,
) -> Any:
    steps: list[int] = []
    load = benchmark.PeersWorkload(
        models=(str(checkpoint),),
        rows=("float32", "int8"),
        cells=cells,
        num_rounds=num_rounds,
        num_threads=1,
        work_dir=tmp_path,
        available=benchmark.Available(**available),
    )
    figures = benchmark.measure(load, on_step=lambda: steps.append(1))
    assert len(steps) == load.total_steps
    return figures


@pytest.mark.timeout(200)
def test_ours_is_measured_alone_and_absent_peers_are_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    figures = run(checkpoint, tmp_path, (LONG_DECODE, TURNS))
    (cells,) = figures["models"]["tiny"].values()
    assert list(cells) == ["decode", "turns"]
    for cell in cells.values():
        assert cell["ours"] > 0
        assert cell["best"] is None
        assert len(cell["rounds"]["session-server"]) == 3
    assert [reason.partition(":")[0] for reason in figures["not_measured"]] == [
        *("int8", "llama.cpp", "transformers"),
    ]
    for sheet in benchmark.SHEETS:
        assert sheet.table(figures).row_count == 2 + 3


@pytest.mark.skipif(not IS_PROOF, reason="takes half a minute: PROVE=1")
@pytest.mark.timeout(200)
def test_transformers_batches_requests_in_turns_with_us(checkpoint: Path, tmp_path: Path) -> None:
    figures = run(checkpoint, tmp_path, (REQUESTS,), num_rounds=3, has_transformers=True)
    cell = figures["models"]["tiny"]["float32"]["requests"]
    assert cell["best"] == "transformers float32"
    assert cell["ratio"] > 0


@pytest.mark.timeout(200)
@pytest.mark.skipif(LLAMA_SERVER is None, reason="LLAMA_SERVER names no llama.cpp server")
def test_llama_cpp_keeps_its_conversations_in_turns_with_us(
    checkpoint: Path, tmp_path: Path
) -> None:
    figures = run(checkpoint, tmp_path, (LONG_DECODE, TURNS), llama_server=LLAMA_SERVER)
    for cell in figures["models"]["tiny"]["float32"].values():
        assert set(cell["medians"]) == {
            "session-server",
            *(variant.name for variant in VARIANTS["float32"]),
        }


def test_a_failed_turn_says_why() -> None:
    async def unknown_token(url: str) -> None:
        conversation = await open_conversation(url)
        with pytest.raises(PeerFailed, match="session-server: "):
            await conversation.turn([1 << 20], 4)
        await conversation.close()

    with LocalServer(["--log-level", "warning"]) as server:
        asyncio.run(unknown_token(server.url))


@pytest.mark.skipif(not IS_PROOF, reason="takes half a minute: PROVE=1")
@pytest.mark.timeout(300)
def test_our_own_costs_are_measured_against_their_goals() -> None:
    steps: list[int] = []
    shape = RandomModel(num_hidden_layers=3)
    load = OwnWorkload(num_rounds=1, long_len=128, kept_len=64, shape=shape)
    figures = measure_own(load, on_step=lambda: steps.append(1))
    assert len(steps) == load.total_steps
    assert len({figure["name"] for figure in figures}) == len(figures) == 18
    by_name = {figure["name"]: figure for figure in figures}
    held = by_name["KV bytes held over needed, pages of 16"]
    assert 1.0 <= held["value"] <= 1.01
    assert held["met"]
