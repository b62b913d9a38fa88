"""A real model misbehaves inside a layer: errors of the device, and numbers that are none."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from cache.session_cache import SessionAwareCache
from cache.spec import Capacity
from session_server.core.batch import Batch
from session_server.core.session_events import TurnCompleted, TurnFailedEntry
from session_server.models.config import FULL_POOL
from session_server.models.decoder import Decoder
from session_server.models.layers.attention import GqaMixer
from session_server.models.registry import load_config
from session_server.runner.model_runner import ModelRunner
from session_server.runner.weights import load_decoder
from tests.faults.points import Points, injects
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import write_checkpoint
from tests.rig.moments import OWNER, Rig, turn
from tests.sim.echo import EchoModel
from tests.sim.hand_engine import HandEngine, LateDevice, Sizes

SIZES = Sizes(num_pages=40, page_size=4, chunk_tokens=8, num_rows=4, max_context_len=64)
TURNS = (
    ("a", turn("t1", *range(3, 15), max_tokens=5, temperature=0.0)),
    ("b", turn("t1", *range(20, 30), max_tokens=7, temperature=0.0)),
    ("a", turn("t2", 40, 41, max_tokens=4, temperature=0.0)),
)
"""Two sessions that share their forwards, and a turn that goes on from another."""

MIX = GqaMixer.__call__


@functools.cache
def decoder() -> Decoder:
    """Two random layers."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama", Path(folder) / "model", num_hidden_layers=2)
        config = load_config(path)
        return load_decoder(path, config, device=torch.device("cpu"), dtype=torch.float32)


def torch_engine() -> HandEngine:
    """An engine stepped by hand over a real model."""
    capacity = Capacity({FULL_POOL: SIZES.num_pages + 1}, SIZES.num_rows, SIZES.max_context_len)
    spec = decoder().config.cache_spec(SIZES.page_size, "float32")
    settings = SIZES.settings(EchoModel(vocab_size=VOCAB_SIZE))
    device = LateDevice(ModelRunner(decoder(), spec, capacity, backend="cpu"))
    return HandEngine(SessionAwareCache(spec, capacity), settings, lambda _: device)


def converse(rig: Rig, failures: Counter[str]) -> dict[str, tuple[int, ...]]:
    """Play the conversation; a turn that fails is asked again. What each turn said in the end."""
    for session_id in "ab":
        rig.open(session_id=session_id)
    said: dict[str, tuple[int, ...]] = {}
    attempts = itertools.count()
    for together in (TURNS[:2], TURNS[2:]):
        left = list(together)
        while left:
            asked = [(name, replace(turn, turn_id=f"try{next(attempts)}")) for name, turn in left]
            for session_id, request in asked:
                rig.submit(session_id, request)
            rig.rest()
            for (session_id, request), (_, plain) in zip(asked, list(left), strict=True):
                end = rig.manager.turn(OWNER, session_id, request.turn_id).end
                if isinstance(end, TurnCompleted):
                    said[session_id + plain.turn_id] = end.outcome.token_ids
                    left.remove((session_id, plain))
                else:
                    assert isinstance(end, TurnFailedEntry)
                    assert end.retryable
                    failures[end.code] += 1
    for session_id in "ab":
        rig.manager.close(OWNER, session_id)
    rig.requests.clear()
    rig.assert_empty()
    return said


Spoil = Callable[[Tensor, Batch], None]
"""What goes wrong with the output of a mixer, [tokens, hidden], in a forward of this batch."""


def strike_every_mix(points: Points, spoil: Spoil, failures: Counter[str]) -> None:
    """Play with call after call of the mixers spoilt; every turn says the same in the end."""
    with Rig(make_engine=torch_engine) as rig:
        device = rig.engine.hand.device
        truth = converse(rig, failures)
        assert not failures
        assert {len(tokens) for tokens in truth.values()} == {5, 7, 4}
        for at in itertools.count():
            numbers = itertools.count()

            def mix(*args: Any, at: int = at, numbers: Iterator[int] = numbers) -> Tensor:
                mixed = MIX(*args)
                if next(numbers) == at:
                    assert device.batch is not None
                    spoil(mixed, device.batch)
                return mixed

            with mock.patch.object(GqaMixer, "__call__", mix):
                assert converse(rig, failures) == truth
            if next(numbers) <= at:
                return
            points.strike()


@injects("device error", "every layer of every forward of a real model, in two ways", points=50)
def test_a_layer_that_raises_costs_nobody_a_token(points: Points) -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        failures: Counter[str] = Counter()

        def spoil(mixed: Tensor, batch: Batch, error: Exception = error) -> None:
            raise error

        strike_every_mix(points, spoil, failures)
        assert not failures, "tried again alone, every turn went well"


@injects("NaN or Inf in the logits", "a row in every layer of a real model", points=50)
def test_a_layer_that_computes_nonsense_fails_that_row_and_no_page_keeps_it(
    points: Points,
) -> None:
    for value, row in ((float("nan"), 0), (float("inf"), 1)):
        failures: Counter[str] = Counter()
        num_before = points.num

        def spoil(mixed: Tensor, batch: Batch, value: float = value, row: int = row) -> None:
            lengths = sorted(one.num_tokens for one in batch.rows)  # as rows lie in a forward
            start = sum(lengths[: row % len(lengths)])
            mixed[start : start + lengths[row % len(lengths)]] = value

        strike_every_mix(points, spoil, failures)
        assert set(failures) == {"numerical_error"}
        assert failures["numerical_error"] <= points.num - num_before
