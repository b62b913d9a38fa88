"""Nothing that launches a forward waits for the device, and results are read when they are there:
on a fake that counts what waits, and on which copies to the host are late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cache.pool import upload
from cache.spec import Capacity
from cache.types import RowId, TableWrite
from session_server.core.batch import (
    Batch,
    BatchRow,
    GraphUse,
    PendingStep,
    PromptLogprobRange,
    StepResult,
)
from session_server.core.sampling import SamplingParams
from session_server.models.config import FULL_POOL
from session_server.models.registry import load_config
from session_server.runner import inputs, model_runner, outputs, sampler
from session_server.runner.graph_sizes import graph_sizes
from session_server.runner.model_runner import ModelRunner
from session_server.runner.weights import load_decoder
from tests.gpu.fake_cuda import CUDA, FakeCuda, PinnedChangedError, fake_cuda
from tests.gpu.padded import CalledAgain
from tests.gpu.seeding import Seed, replaced
from tests.oracle.checkpoints import write_checkpoint
from tests.runner.rows import PAGES_PER_ROW, Rows
from tests.runner.test_model_runner import prompt

pytest.importorskip("triton", reason="triton has no wheel for this machine")

PAGE_SIZE = 16
NUM_ROWS = 6
CPU = torch.device("cpu")

SAMPLED = SamplingParams(temperature=0.8)
TURNS: dict[int, SamplingParams] = {
    1: SamplingParams(),
    2: SAMPLED,
    3: SamplingParams(temperature=1.1, top_p=0.9, top_k=40),
    4: SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((5, 3.0),)),
    5: SamplingParams(
        temperature=0.7, min_tokens=3, stop_token_ids=(9,), logprobs=True, top_logprobs=2
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3", tmp_path_factory.mktemp("qwen"), num_hidden_layers=1)


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with fake_cuda() as device:
        yield device


def runner_of(checkpoint: Path, device: torch.device, *, has_draft: bool = False) -> ModelRunner:
    config = load_config(checkpoint)
    decoder = load_decoder(checkpoint, config, device=device, dtype=torch.float32)
    pages = dict.fromkeys(config.pools, NUM_ROWS * PAGES_PER_ROW + 1)
    return ModelRunner(
        decoder,
        config.cache_spec(PAGE_SIZE, "float32"),
        Capacity(pages, NUM_ROWS, PAGES_PER_ROW * PAGE_SIZE),
        backend="triton",
        eos_token_ids=(2,),
        draft=decoder if has_draft else None,
    )


class Script:
    """Batches whose rows nobody on the host has seen the tokens of."""

    def __init__(self, runner: ModelRunner, *, makes_drafts: bool) -> None:
        self.rows = Rows(runner, PAGE_SIZE)
        self.makes_drafts = makes_drafts
        self.lengths = {1: 20, 2: 3, 3: 37, 4: 16, 5: 1}

    def batches(self) -> Iterator[Batch]:
        """Prompts in chunks, one token each, drafts, all in one."""
        row, tokens = self.rows.row, {n: prompt(length, n) for n, length in self.lengths.items()}
        asked = PromptLogprobRange(4, tokens[3][5:9], 2)
        yield self.rows.batch(
            *[row(n, tokens[n], params=TURNS[n], seed=n) for n in (1, 2, 4, 5)],
            row(3, tokens[3][:30], sample=False, params=TURNS[3], prompt_logprobs=asked),
        )
        yield self.rows.batch(row(3, tokens[3][30:], start=30), *self.unseen(1, 2, 4, 5))
        yield self.rows.batch(*self.unseen(3, 1, 2, 5))
        yield self.rows.batch(*self.unseen(5, 4, 1))
        yield self.rows.batch(*self.drafted({2: 2, 4: 1, 5: 2}), *self.unseen(1, 3))

    def unseen(self, *which: int) -> list[BatchRow]:
        listed = [self.rows.row(n, None, start=self.lengths[n]) for n in which]
        for n in which:
            self.lengths[n] += 1
        return listed

    def drafted(self, which: dict[int, int]) -> list[BatchRow]:
        return [
            self.rows.row(
                n,
                None,
                start=self.lengths[n],
                drafts=num_drafts if self.makes_drafts else prompt(num_drafts, n),
            )
            for n, num_drafts in which.items()
        ]


def overlapped(script: Script, device: FakeCuda | None) -> list[StepResult]:
    """Launch each forward before the result of the one before is read; nothing waits for the
    device but the event behind the copies of a result."""
    results: list[StepResult] = []
    pending: list[PendingStep] = []
    waits = Counter[str]() if device is None else device.waits
    waits.clear()
    for batch in script.batches():
        pending.append(script.rows.runner.launch(batch))
        assert waits == {}
        assert device is None or not pending[-1].is_done()
        if len(pending) == 2:
            results.append(pending.pop(0).wait())
            assert waits == {}
    results += [step.wait() for step in pending]
    assert waits == {}
    assert [result.error for result in results] == [None] * len(results)
    return results


def assert_alike(ours: StepResult, theirs: StepResult) -> None:
    """Both say the same tokens, as likely."""
    for our, their in zip(ours.row_results(), theirs.row_results(), strict=True):
        assert (our.token_ids, our.finite) == (their.token_ids, their.finite)
        for sides in ((our.logprobs, their.logprobs), (our.prompt_logprobs, their.prompt_logprobs)):
            for mine, other in zip(*sides, strict=True):
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [i for i, _ in mine.top] == [i for i, _ in other.top]


def told(
    checkpoint: Path, where: torch.device, device: FakeCuda | None, kind: str
) -> list[StepResult]:
    runner = runner_of(checkpoint, where, has_draft="draft model" in kind)
    if "graphs" in kind and device is not None:
        assert runner.capture_graphs(graph_sizes(8, 2), CalledAgain()) is None
    results = overlapped(Script(runner, makes_drafts="draft model" in kind), device)
    assert device is None or runner.graphs is None or runner.graphs.uses[GraphUse.REPLAYED] >= 3
    return results


@pytest.mark.parametrize("kind", ["", "graphs", "draft model", "graphs, draft model"])
def test_no_launch_waits_and_every_result_is_that_of_the_cpu(
    kind: str, checkpoint: Path, device: FakeCuda
) -> None:
    there, here = told(checkpoint, CUDA, device, kind), told(checkpoint, CPU, None, kind)
    for ours, theirs in zip(there, here, strict=True):
        assert_alike(ours, theirs)


def test_a_step_that_decodes_goes_to_the_device_in_one_copy(
    checkpoint: Path, device: FakeCuda
) -> None:
    runner = runner_of(checkpoint, CUDA)
    assert runner.capture_graphs(graph_sizes(4, 0), CalledAgain()) is None
    rows = Rows(runner, PAGE_SIZE)
    rows.run(rows.row(1, prompt(5, 1)), rows.row(2, prompt(7, 2)))
    copies = []
    pages = [np.array([page], dtype=np.int32) for page in (9, 10)]
    for writes in (
        (),
        tuple(TableWrite(FULL_POOL, RowId(1), i, page) for i, page in enumerate(pages)),
    ):
        before = device.num_copies_in
        rows.runner.launch(
            rows.batch(rows.row(1, None, start=5), rows.row(2, None, start=7), writes=writes)
        ).wait()
        copies.append(device.num_copies_in - before)
    assert copies == [1, 2], "one more for the pages of any number of rows"


def _one_buffer(patch: pytest.MonkeyPatch) -> None:
    """Everything goes to the device through the same pinned memory."""
    staging: dict[torch.dtype, Tensor] = {}

    def upload(host: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return host.to(device)
        buffer = staging.setdefault(
            host.dtype, torch.empty(1 << 16, dtype=host.dtype, pin_memory=True)
        )[: host.numel()].view(host.shape)
        return buffer.copy_(host).to(device, non_blocking=True)

    patch.setattr(inputs, "upload", upload)


BUGS: dict[str, Seed] = {
    "results are read before the event": replaced(
        outputs, "            self.finished.synchronize()\n", "", "EventStep.wait"
    ),
    "the event is recorded before the copies": replaced(
        outputs,
        "        outputs.start_copies()\n        finished.record()\n",
        "        finished.record()\n        outputs.start_copies()\n",
        "EventStep.record",
    ),
    "a step is done at once": replaced(
        outputs, "return bool(self.finished.query())", "return True", "EventStep.is_done"
    ),
    "results are copied when they are asked for": replaced(
        outputs, "        outputs.start_copies()\n", "", "EventStep.record"
    ),
    "pinned memory is used again at once": _one_buffer,
    "inputs come from pageable memory": replaced(
        upload,
        "    return host.pin_memory().to(device, non_blocking=True)",
        "    return host.to(device, non_blocking=True)",
        "upload",
    ),
    "a copy to the device waits": replaced(
        upload, "non_blocking=True", "non_blocking=False", "upload"
    ),
    "the host looks at what was sampled": replaced(
        model_runner,
        "            self._sampler.count_outputs(spans, tokens)\n",
        "            self._sampler.count_outputs(spans, tokens)\n            tokens.tolist()\n",
        "ModelRunner._sample",
    ),
    "rows are chosen by a list": replaced(
        sampler,
        "adjusted.index_copy_(0, index, of_rows)",
        "adjusted[rows] = of_rows",
        "Sampler.adjusted",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str, checkpoint: Path, device: FakeCuda) -> None:
    here = told(checkpoint, CPU, None, "")

    def try_it() -> None:
        for ours, theirs in zip(told(checkpoint, CUDA, device, ""), here, strict=True):
            assert_alike(ours, theirs)

    with pytest.MonkeyPatch.context() as patch:
        BUGS[name](patch)
        with pytest.raises((AssertionError, PinnedChangedError)):
            try_it()
