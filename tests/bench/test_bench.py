"""Benchmarks measure what they say; their figures are reported, never asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from session_server.bench import kept, memory_check, sockets, speculation, store, structured, tiers
from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.bench.growth import GrowthWorkload, measure_growth, plot_growth
from session_server.bench.host import measure_admission, measure_idle_sessions, measure_running
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import RunnerOptions, load_runner
from tests.bench import kv_dtype, mla, not_found, page_copy


def test_the_random_checkpoint_loads_through_the_real_path(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, RandomModel(max_position_embeddings=4096))
    loaded = load_runner(
        tmp_path,
        RunnerOptions(page_size=16, num_rows=2, memory=MemoryLimits(max_total_tokens=256)),
    )
    assert loaded.config.max_position_embeddings == 4096


@pytest.mark.timeout(200)
def test_growth_counts_every_turn_and_only_new_tokens(tmp_path: Path) -> None:
    done = []
    growth = measure_growth(GrowthWorkload(num_turns=24), on_step=lambda: done.append(1))
    assert len(done) == len(growth["turns"]) == 24
    for before, after in zip(growth["turns"], growth["turns"][1:], strict=False):
        assert after["context_tokens"] - before["context_tokens"] == 16 + 8
        assert after["context_tokens"] - after["cached_tokens"] in {16, 17}
        assert 0 < after["forward_ms"] < after["latency_ms"]
    assert growth["context_tokens"]["tail"] > growth["context_tokens"]["head"]
    plot_growth(growth["turns"], tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 1000


@pytest.mark.timeout(200)
def test_the_three_ways_to_send_a_next_turn_are_measured_in_turns() -> None:
    done = []
    load = kept.KeptWorkload(histories=(64,), num_rounds=1)
    figures = kept.measure(load, on_step=lambda: done.append(1))
    assert len(done) == len(kept.WAYS)
    assert set(figures["histories"]["64"]["median_ms"]) == set(kept.WAYS)


@pytest.mark.timeout(200)
def test_drafting_servers_give_the_answers_of_one_that_does_not() -> None:
    visits = []
    load = speculation.SpeculationWorkload(
        drafts=(4,), num_rounds=1, num_sessions=2, num_turns=4, num_repeated=48
    )
    figures = speculation.measure(load, on_step=lambda: visits.append(1))["workloads"]
    assert len(visits) == load.total_steps
    assert set(figures) == set(speculation.WORKLOADS)
    for by_drafts in figures.values():
        plain, guessed = by_drafts["0"], by_drafts["4"]
        assert plain["tokens_per_forward"] <= 1.0 < guessed["tokens_per_forward"]
        assert plain["speed_ratio"] == 1.0
        assert guessed["num_outputs"] == plain["num_outputs"]
        assert guessed["different_answers"] == 0


@pytest.mark.timeout(200)
def test_sessions_that_pools_have_no_room_for_say_the_same_with_their_kv_kept_and_without() -> None:
    steps = []
    load = tiers.TiersWorkload(
        num_sessions=6,
        num_tokens=128,
        num_resident=2,
        history=256,
        num_restarts=1,
        host_mib=16,
        num_compared=4,
    )
    figures = tiers.measure(load, on_step=lambda: steps.append(1))
    assert len(steps) == load.total_steps
    assert set(figures["ways"]) == set(tiers.WAYS)
    for way, each in figures["ways"].items():
        assert each["num_wrong"] == 0
        assert 0 < each["p50_ms"] <= each["p95_ms"]
        assert (each["cached_share"] > 0.8) == (way != "none")
    assert figures["restart"]["after a restart"]["ms"] > 0


@pytest.mark.timeout(200)
def test_turns_on_disk_are_timed_beside_others_and_starts_with_many_of_them() -> None:
    steps = []
    load = store.StoreWorkload(num_sessions=4, num_turns=2, num_rounds=1, stored=(0, 100))
    figures = store.measure(load, on_step=lambda: steps.append(1))
    assert len(steps) == load.total_steps
    assert set(figures["kinds"]) == {store.SQLITE, store.PLAIN}
    for kind in figures["kinds"].values():
        assert kind["turns_per_s"] > 0 < kind["first_token_ms"]
    commits = figures["commits"][store.SQLITE]
    assert commits["number"] > load.num_turns * load.num_rounds
    assert commits["mean_ms"] > 0 < commits["p99_ms"]
    assert figures["starts"]["100"]["ready_s"] > 0 < figures["starts"]["0"]["ready_s"]


@pytest.mark.timeout(200)
def test_the_memory_checker_is_timed_against_its_absence() -> None:
    rounds = []
    load = memory_check.MemoryCheckWorkload(
        idle_counts=(0, 20), running_counts=(1, 2), num_rounds=2
    )
    figures = memory_check.measure(load, on_step=lambda: rounds.append(1))
    assert len(rounds) == load.total_steps == 8
    assert figures["violations"] == 0
    assert len(figures["variants"]) == 4
    for figure in figures["variants"].values():
        assert figure["off_us"] > 0 < figure["on_us"]
        assert figure["noise_ratio"] > 0 < figure["ratio"]
        assert 0 < figure["check_us"] < figure["on_us"]
        assert 0 < figure["own_share"] < 1


@pytest.mark.timeout(200)
def test_answers_held_to_a_schema_are_timed_against_free_ones() -> None:
    rounds = []
    load = structured.StructuredWorkload(
        num_sessions=2, num_outputs=6, num_rounds=1, shape=RandomModel()
    )
    figures = structured.measure(load, on_step=lambda: rounds.append(1))
    assert len(rounds) == load.total_steps == 2
    assert figures["kinds"]["free"]["ratio"] == 1.0
    assert figures["kinds"]["held"]["token_ms"] > 0


def test_sockets_are_timed_over_every_token() -> None:
    ended: list[int] = []
    figures = sockets.measure_sockets(on_step=lambda: ended.append(1))
    assert len(ended) == sockets.NUM_TURNS
    assert figures["cpu_us_per_token"] > 0
    assert figures["tokens_per_s"] > 0


def test_host_benchmarks_time_the_real_engine() -> None:
    rounds = []
    running = measure_running((1, 4), on_step=lambda: rounds.append(1))
    idle = measure_idle_sessions((0, 20), on_step=lambda: rounds.append(1))
    admission = measure_admission((0, 512), on_step=lambda: rounds.append(1))
    assert rounds
    for figures in (running, idle, admission):
        assert all(figure["median_us"] > 0 for figure in figures.values())
        assert next(iter(figures.values()))["ratio"] == 1.0


def test_latent_attention_is_timed_in_every_way_at_every_history() -> None:
    steps = []
    load = mla.MlaWorkload(hidden_size=64, num_layers=1, histories=(20, 40), num_steps=2)
    figures = mla.measure(load, on_step=lambda: steps.append(1))
    assert len(steps) == load.total_steps == len(mla.WAYS) * 2 * 3
    assert figures["bytes_per_layer_token"] == (512 + 64) * 4
    assert set(figures["ways"]) == set(mla.WAYS)
    for of_way in figures["ways"].values():
        assert of_way["20"]["ratio"] == 1.0
        assert of_way["20"]["median_ms"] > 0 < of_way["40"]["median_ms"]


def test_kv_in_halves_is_measured_beside_kv_in_fp32() -> None:
    steps: list[int] = []
    load = kv_dtype.KvDtypeWorkload(
        model=RandomModel(num_hidden_layers=1), histories=(20, 40), num_steps=2
    )
    figures = kv_dtype.measure(load, on_step=lambda: steps.append(1))
    assert len(steps) == load.total_steps == 3 * 2 * 3
    assert figures["bytes_per_token"] == {"float32": 512, "bfloat16": 256, "float16": 256}
    for by_dtype in figures["histories"].values():
        assert by_dtype["float32"]["speed"] == by_dtype["float32"]["speed_at_best"] == 1.0
        assert all(figure["min_ms"] > 0 for figure in by_dtype.values())


def test_the_time_of_what_another_key_owns_is_measured_beside_that_of_nothing() -> None:
    figures = not_found.measure(not_found.NotFoundWorkload(num_requests=4))
    assert set(figures) == set(not_found.PATHS)
    for of_path in figures.values():
        assert all(0.0 <= each <= 1.0 for each in of_path["order"].values())
        assert all(each > 0 for each in of_path["median_us"].values())
    assert [not_found.order_of(*times) for times in ([[1], [2]], [[2], [1]])] == [0.0, 1.0]
    assert not_found.order_of([1, 2], [1.5]) == 0.5


def test_copies_of_pages_are_measured_beside_plain_ones() -> None:
    load = page_copy.CopyWorkload(num_tensors=2, page=(4, 2), num_pages=16, num_rounds=2)
    figures = page_copy.measure(load)
    assert figures["mib"] == 2 * 16 * 4 * 2 * 4 / (1 << 20)
    assert set(figures["copies"]) == set(page_copy.layouts(16))
    for ways in figures["copies"].values():
        assert all(ways[way]["plain_ms"] > 0 < ways[way]["paged_ms"] for way in page_copy.WAYS)
