"""Conversations through a `ModelRunner`, every logit of them against `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from session_server.models.decoder import Decoder
from session_server.models.registry import load_config
from session_server.runner.loader import layer_factories
from session_server.runner.model_runner import BackendName, ModelRunner
from session_server.runner.paged_decoder import ComputeBackend
from session_server.runner.weights import load_decoder
from tests.models.raw_configs import VOCAB_SIZE
from tests.oracle.checkpoints import reference_logits
from tests.oracle.conversations import (
    ANSWER_LEN,
    NUM_TURNS,
    Conversation,
    Drive,
    Layout,
    capacity,
    conversations,
    pool_pages,
)
from tests.oracle.device import DEVICE

TOLERANCE = 1e-4


def load(directory: Path, *, backend: ComputeBackend = "torch") -> Decoder:
    config, factories = load_config(directory), layer_factories(backend, "float32")
    return load_decoder(directory, config, device=DEVICE, dtype=torch.float32, factories=factories)


class Oracle:
    """Checkpoints, and our decoders of them."""

    def __init__(self, checkpoints: Mapping[str, Path]) -> None:
        self._checkpoints = checkpoints
        self._decoders: dict[tuple[Path, ComputeBackend], Decoder] = {}

    def directory(self, family: str) -> Path:
        return self._checkpoints[family]

    def talk(
        self,
        directory: Path,
        *,
        page_size: int,
        chunk: int,
        layout: Layout = Layout.CONSECUTIVE,
        backend: BackendName = "auto",
        loaded_for: ComputeBackend = "torch",
    ) -> float:
        """Hold mixed conversations and compare every logit and every greedy token."""
        if (directory, loaded_for) not in self._decoders:
            self._decoders[directory, loaded_for] = load(directory, backend=loaded_for)
        decoder = self._decoders[directory, loaded_for]
        spec = decoder.config.cache_spec(page_size, "float32")
        runner = ModelRunner(decoder, spec, capacity(decoder.config, page_size), backend=backend)
        sessions = conversations(seed=7, vocab_size=VOCAB_SIZE)
        pages = pool_pages(decoder.config, layout, page_size)
        Drive(runner, page_size, chunk, pages).run(sessions)
        return max(self._assert_exact(session, directory) for session in sessions)

    def _assert_exact(self, session: Conversation, directory: Path) -> float:
        """Returns the largest difference between logits."""
        # The last answer token was sampled but never computed.
        computed = session.tokens[: session.num_computed]
        expected = reference_logits(directory, computed)
        seen = torch.stack([session.logits[position] for position in range(len(computed))]).cpu()
        worst = (seen - expected).abs().max().item()
        assert worst <= TOLERANCE
        assert len(session.answers) == NUM_TURNS * ANSWER_LEN
        best = expected.argmax(dim=-1).tolist()
        assert session.answers == {i: best[i - 1] for i in session.answers}
        return worst
