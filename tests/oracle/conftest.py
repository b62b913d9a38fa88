"""One random checkpoint per family, written when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, reference_logits, write_checkpoint
from tests.oracle.oracle import Oracle
from tests.oracle.talks import Reference

ALL_FAMILIES = (*FAMILIES, *LAYERED_FAMILIES)


class Checkpoints(dict[str, Path]):
    """Directories by family."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, family: str) -> Path:
        self[family] = write_checkpoint(family, self._root / family)
        return self[family]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def references(checkpoints: Checkpoints) -> Mapping[str, Reference]:
    """The reference of every family: a full forward without a cache."""

    def reference(family: str, tokens: list[int]) -> torch.Tensor:
        return reference_logits(checkpoints[family], tokens)

    return {family: partial(reference, family) for family in ALL_FAMILIES}


@pytest.fixture(scope="session")
def oracle(checkpoints: Checkpoints) -> Oracle:
    return Oracle(checkpoints)
