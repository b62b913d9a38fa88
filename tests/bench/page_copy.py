"""`python -m tests.bench.page_copy`: compare copies of pages between pools and host memory to a
plain copy of as many bytes.

The pools are those of a model of 100 million parameters in fp32, the copy is of a session of 8,192
tokens, whose pages lie in one run, in runs of eight, or apart. On a GPU, both go over the bus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from cache.pool.page_copy import HostPages, PagedTensor, host_memory
from cache.types import Pages
from session_server.bench.harness import take_turns
from session_server.bench.sheet import Sheet

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
WAYS: Final = ("in", "out")


@dataclass(frozen=True, slots=True)
class CopyWorkload:
    """Configure `num_tensors` pools with pages of this shape, twice as many as are copied."""

    num_tensors: int = 24
    page: tuple[int, ...] = (16, 4, 64)
    num_pages: int = 512
    num_rounds: int = 9


def layouts(num_pages: int) -> dict[str, Pages]:
    """Where the pages lie: of twice as many, by name."""
    shuffled = np.random.default_rng(0).permutation(2 * num_pages)[:num_pages]
    return {
        "one run": np.arange(num_pages, dtype=np.int32),
        "runs of eight": np.arange(2 * num_pages, dtype=np.int32).reshape(-1, 8)[::2].ravel(),
        "apart": shuffled.astype(np.int32),
    }


def measure(load: CopyWorkload) -> dict[str, Any]:
    """Time the copies in turns with plain ones; the first round warms up."""
    storages = [
        torch.randn((2 * load.num_pages, *load.page), device=DEVICE)
        for _ in range(load.num_tensors)
    ]
    tensors = [PagedTensor(storage, 0) for storage in storages]
    shapes = [tensor.shape_of(load.num_pages) for tensor in tensors]
    host = host_memory(shapes, is_pinned=DEVICE == "cuda")
    figures = {}
    for name, pages in layouts(load.num_pages).items():
        for way in WAYS:
            plain, paged = (partial(each, way) for each in (_plain, partial(_paged, pages)))
            copies = {
                "plain": partial(plain, storages, host),
                "paged": partial(paged, tensors, host),
            }
            times = take_turns(
                {kind: partial(_ms, copy) for kind, copy in copies.items()},
                load.num_rounds + 1,
                lambda: None,
            )
            plain_ms, paged_ms = (float(np.median(times[kind][1:])) for kind in ("plain", "paged"))
            figures.setdefault(name, {})[way] = {
                "plain_ms": plain_ms,
                "paged_ms": paged_ms,
                "ratio": paged_ms / plain_ms,
            }
    return {"mib": sum(each.nbytes for each in host) / (1 << 20), "copies": figures}


SHEETS: Final = (
    Sheet(
        "copies of {mib:.0f} MiB",
        lambda report: report["copies"],
        ("pages", "way"),
        {
            "plain, ms": "{plain_ms:.1f}",
            "of pages, ms": "{paged_ms:.1f}",
            "ratio": "{ratio:.2f}",
        },
    ),
)


def _plain(way: str, storages: list[Tensor], host: list[HostPages]) -> None:
    for storage, block in zip(storages, host, strict=True):
        outside, inside = torch.from_numpy(block), storage[: len(block)].view(torch.uint8)
        target, source = (inside, outside) if way == "in" else (outside, inside)
        if DEVICE == "cpu":
            np.copyto(target.numpy(), source.numpy())
        else:
            target.copy_(source)


def _paged(pages: Pages, way: str, tensors: list[PagedTensor], host: list[HostPages]) -> None:
    for tensor, block in zip(tensors, host, strict=True):
        if way == "in":
            tensor.copy_in(block, 0, pages)
        else:
            tensor.copy_out(pages, block)


def _ms(copy: Callable[[], None]) -> float:
    started = perf_counter()
    copy()
    return (perf_counter() - started) * 1e3


if __name__ == "__main__":
    report = measure(CopyWorkload())
    Console().print(*(sheet.table(report) for sheet in SHEETS))
