"""`RankGroup`: the collectives of one model's ranks, by `torch.distributed`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from session_server.core.environment import bind_gloo_to_loopback
from session_server.parallel.sharding import Shard

COLLECTIVE_TIMEOUT_S: Final = 60.0
"""Seconds that a rank waits for the others in the middle of a forward."""


class RankLost(Exception):
    """Report ranks that are out of step: one is gone, hangs or has failed in a forward.

    No later forward can be right, so the engine ends. It is no RuntimeError, of which a runner
    makes the failure of a single step.
    """


class RankGroup:
    """Sum and share tensors among the ranks. One in a process; not thread-safe.

    `device`: where the rank computes; gloo serves CPUs, NCCL serves GPUs.
    """

    def __init__(self, shard: Shard, device: torch.device, store: Path) -> None:
        """Wait for all ranks.

        `store`: a file in a directory of the user's own, new for each group, by which they find
        each other.

        Raises:
            RankLost: they do not come within `COLLECTIVE_TIMEOUT_S`.
        """
        self.shard = shard
        self.device = device
        bind_gloo_to_loopback()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        with _losing_ranks():
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=dist.FileStore(str(store), shard.size),  # type: ignore[attr-defined]
                rank=shard.rank,
                world_size=shard.size,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            self.sum_(torch.zeros(1, device=device))  # NCCL connects only now

    def sum_(self, x: Tensor) -> Tensor:
        """Replace `x` by its sum over ranks, the same bits on each, and return it.

        Raises:
            RankLost: another rank does not take part.
        """
        with _losing_ranks():
            dist.all_reduce(x)
        return x

    def share_(self, x: Tensor) -> Tensor:
        """Replace `x` by that of rank 0, and return it.

        Raises:
            RankLost: another rank does not take part.
        """
        with _losing_ranks():
            dist.broadcast(x, 0)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape, on rank 0; nothing elsewhere.

        Raises:
            RankLost: another rank does not take part.
        """
        is_first = self.shard.rank == 0
        parts = [torch.empty_like(x) for _ in range(self.shard.size)] if is_first else None
        with _losing_ranks():
            dist.gather(x, parts, 0)
        return parts or []

    def agree(self, holds: Tensor) -> Tensor:
        """Return whether a bool scalar is true on every rank.

        Raises:
            RankLost: another rank does not take part.
        """
        return self.sum_(holds.to(torch.float32)) == self.shard.size

    def close(self) -> None:
        """Leave the group; the process may then make another."""
        dist.destroy_process_group()


@contextmanager
def _losing_ranks() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise RankLost(f"a rank is gone or hangs: {lines[0]}") from error
