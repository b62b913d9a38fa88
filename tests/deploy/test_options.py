"""What Ray Serve is told of the replicas."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from session_server.config import (
    EngineOptions,
    HttpOptions,
    ModelOptions,
    SessionOptions,
    Settings,
)
from session_server.core.engine_client import STOP_TIMEOUT_S
from session_server.deploy.autoscaling import (
    KV_USE,
    TARGET_KV_USE,
    TARGET_TURNS,
    TURNS,
    num_replicas,
)
from session_server.deploy.options import (
    MAX_REPLICAS,
    POLICY,
    ReplicaCount,
    ReplicaOptions,
    deployment_options,
    replica_count,
    replica_settings,
)

TWO = ReplicaOptions(ReplicaCount(2, 2), num_cpus=1.5, num_gpus=0.0)
SOME = ReplicaOptions(ReplicaCount(1, 8), num_cpus=1.0, num_gpus=1.0)


def http(**options: object) -> Settings:
    return Settings(http=HttpOptions.model_validate(options))


@pytest.mark.parametrize(
    ("text", "count"),
    [("1", (1, 1)), ("2-8", (2, 8)), ("3-3", (3, 3)), (str(MAX_REPLICAS), (MAX_REPLICAS,) * 2)],
)
def test_replicas_are_a_number_or_a_range(text: str, count: tuple[int, int]) -> None:
    assert replica_count(text) == ReplicaCount(*count)
    assert replica_count(str(replica_count(text))) == ReplicaCount(*count)


@pytest.mark.parametrize("text", ["0", "-1", "2-", "8-2", "0-2", "two", "", "2-8-9", "99999"])
def test_other_words_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="as in 2-8"):
        replica_count(text)


def test_every_open_socket_has_room_among_the_ongoing_requests() -> None:
    told = deployment_options(http(max_connections=5000), TWO)
    assert told["max_ongoing_requests"] > 5000


@pytest.mark.parametrize("drain_s", [0.0, 10.0, 600.0])
def test_ray_waits_for_the_drain_and_for_the_engine(drain_s: float) -> None:
    told = deployment_options(http(drain_s=drain_s), TWO)
    assert told["graceful_shutdown_timeout_s"] > drain_s + STOP_TIMEOUT_S
    assert told["graceful_shutdown_wait_loop_s"] < 1


def test_a_fixed_number_is_not_scaled_and_a_range_is() -> None:
    fixed, scaled = deployment_options(Settings(), TWO), deployment_options(Settings(), SOME)
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    assert "num_replicas" not in scaled
    config = scaled["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (1, 8)
    module, _, name = POLICY.partition(":")
    assert getattr(importlib.import_module(module), name) is num_replicas


def test_a_replica_has_the_settings_of_serve_and_its_part_of_the_machine() -> None:
    given = Settings(engine=EngineOptions(max_running_turns=3), http=HttpOptions(drain_s=7.0))
    made = replica_settings(given, ReplicaOptions(ReplicaCount(1, 1), 4.0, 0.0))
    assert made.model.threads == 4
    assert made.sessions.store == "none", "each would have a store of its own"
    kept = made.model_copy(update={"model": given.model, "sessions": given.sessions})
    assert kept == given
    chosen = Settings(model=ModelOptions(threads=2))
    assert replica_settings(chosen, TWO).model.threads == 2


def test_the_proxies_have_the_certificate_and_no_replica_does() -> None:
    given = http(ssl_certfile=Path("/c.pem"), ssl_keyfile=Path("/k.pem"))
    made = replica_settings(given, TWO).http
    assert (made.ssl_certfile, made.ssl_keyfile) == (None, None)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (http(admin_port=0), "--admin-port"),
        (Settings(sessions=SessionOptions(store=Path("/sessions"))), "--store /sessions"),
    ],
)
def test_what_replicas_cannot_do_is_refused_by_its_flag(settings: Settings, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replica_settings(settings, TWO)


def needed(current: int, **reported: list[float]) -> int:
    metrics = {name: dict(enumerate(values)) for name, values in reported.items()}
    context = SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=current)
    return num_replicas(context)[0]


def test_as_many_replicas_run_as_their_turns_and_their_kv_need() -> None:
    assert needed(2, **{TURNS: [TARGET_TURNS, TARGET_TURNS], KV_USE: [0.0, 0.0]}) == 2
    assert needed(2, **{TURNS: [TARGET_TURNS, 2 * TARGET_TURNS], KV_USE: [0.0, 0.0]}) == 3
    assert needed(2, **{TURNS: [0.0, 0.0], KV_USE: [TARGET_KV_USE, 2 * TARGET_KV_USE]}) == 3
    assert needed(2, **{TURNS: [0.1, 0.1], KV_USE: [0.1, 0.1]}) == 1
    assert needed(3, **{TURNS: [0.0] * 3, KV_USE: [0.0] * 3}) == 1


def test_nothing_changes_before_a_replica_has_reported() -> None:
    assert needed(3) == 3
    context = SimpleNamespace(aggregated_metrics=None, current_num_replicas=3)
    assert num_replicas(context)[0] == 3
