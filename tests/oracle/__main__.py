"""`python -m tests.oracle` measures how far families are from `transformers`, and records it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.oracle.checkpoints import FAMILIES, LAYERED_FAMILIES, write_checkpoint
from tests.oracle.conversations import Layout
from tests.oracle.oracle import Oracle
from tests.oracle.record import CHUNKS, PAGE_SIZES, RECORD


def main() -> None:
    """Hold the conversations of the tests on every page size and chunk size."""
    torch.set_num_threads(1)
    worst = {}
    for family in (*FAMILIES, *LAYERED_FAMILIES):
        with TemporaryDirectory() as root:
            directory = write_checkpoint(family, Path(root))
            oracle = Oracle({family: directory})
            worst[family] = max(
                oracle.talk(directory, page_size=page_size, chunk=chunk, layout=Layout.SCATTERED)
                for page_size, chunk in itertools.product(PAGE_SIZES, CHUNKS)
            )
        print(family, worst[family], flush=True)
    RECORD.write_text(json.dumps(worst, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
