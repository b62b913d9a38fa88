"""Every accepted turn is in the metrics once, with what its client waited for, however it ends."""

from __future__ import annotations

import asyncio

from session_server.metrics.prometheus import ServerMetrics
from tests.web.serving import Served, served, turn
from tests.web.test_quotas import ring, serving_at


def counted(metrics: ServerMetrics, name: str, label: str) -> dict[str, float]:
    """The values of a counter by its label, without those that are 0."""
    return {
        sample.labels[label]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == f"session_server_{name}" and sample.value
    }


def value(metrics: ServerMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"session_server_{name}")


@served()
async def test_a_turn_whose_engine_dies_has_failed(this: Served) -> None:
    session_id = await this.open()
    path = f"/v1/sessions/{session_id}/turns"
    assert (await this.http.post(path, json=turn(turn_id="t1"))).status_code == 200
    this.is_held = True
    running = asyncio.create_task(this.http.post(path, json=turn(turn_id="t2")))
    await this.until(lambda: bool(this.engine.commands))
    this.engine.die()
    this.engine.come_up()
    this.is_held = False
    assert (await running).status_code == 503
    metrics = this.services.metrics
    assert counted(metrics, "turns_total", "outcome") == {"length": 1, "failed": 1}
    assert counted(metrics, "turn_failures_total", "code") == {"engine_restarting": 1}
    assert counted(metrics, "refusals_total", "code") == {}
    assert value(metrics, "turn_seconds_count") == 2
    assert value(metrics, "time_to_first_token_seconds_count") == 1


def test_a_turn_that_is_refused_when_its_time_comes_has_failed() -> None:
    async def scenario() -> None:
        keys = ring(input_tokens_per_min=3)
        async with serving_at([0.0], keys) as this, this.socket() as wire:
            this.is_held = True
            for turn_id in ("t1", "t2"):
                fields = turn(input_ids=[5, 6, 7], max_tokens=1)
                await wire.send("turn.create", turn_id=turn_id, **fields)
                await wire.until("turn.created")
            this.is_held = False
            await wire.until("turn.failed")
            metrics = this.services.metrics
            assert counted(metrics, "turns_total", "outcome") == {"length": 1, "failed": 1}
            assert counted(metrics, "turn_failures_total", "code") == {"quota_exceeded": 1}
            assert counted(metrics, "refusals_total", "code") == {}

    asyncio.run(scenario())


def test_a_first_token_is_waited_for_from_the_request_on_and_not_from_its_turn() -> None:
    clock = [0.0]

    async def scenario() -> None:
        async with serving_at(clock, ring()) as this, this.socket() as wire:
            this.is_held = True
            for turn_id in ("t1", "t2"):
                fields = turn(input_ids=[5, 6, 7], max_tokens=1)
                await wire.send("turn.create", turn_id=turn_id, **fields)
                await wire.until("turn.created")
            clock[0] = 4.0
            this.is_held = False
            for _ in range(2):
                await wire.until("turn.completed")
            metrics = this.services.metrics
            assert value(metrics, "time_to_first_token_seconds_sum") == 4.0 + 4.0
            assert value(metrics, "turn_seconds_sum") == 4.0 + 4.0
            assert metrics.recent.take().ttft_ms == (4000.0, 4000.0)

    asyncio.run(scenario())
