"""One random checkpoint per family, written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers

from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, write_checkpoint
from tests.oracle.oracle import Oracle
from tests.oracle.talks import Reference

ALL_FAMILIES = (*FAMILIES, *LAYERED_FAMILIES)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: write_checkpoint(family, root / family) for family in ALL_FAMILIES}


@pytest.fixture(scope="session")
def references(checkpoints: Mapping[str, Path]) -> Mapping[str, Reference]:
    """The reference of every family: a full forward without a cache."""

    def reference(directory: Path) -> Reference:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

        def logits(tokens: list[int]) -> torch.Tensor:
            with torch.no_grad():
                return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

        return logits

    return {family: reference(directory) for family, directory in checkpoints.items()}


@pytest.fixture(scope="session")
def oracle(checkpoints: dict[str, Path]) -> Oracle:
    return Oracle(checkpoints)
