"""Turn what a forward left on the device into a `StepResult`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from msgspec import structs
from torch import Tensor

from session_server.core.batch import Batch, GraphUse, RowResult, StepResult
from session_server.core.sampling import TokenLogprob
from session_server.runner.logprobs import DeviceLogprobs
from session_server.runner.verification import SampleSpan


@dataclass(slots=True)
class SampledRows:
    """Hold what sampled rows chose: `tokens`, int64 [n], and `finite`, bool [n], span after span.

    `wants_logprobs` and `num_top` are per span. `num_accepted`: int64 [spans], accepted drafts of
    each span; None if there were no drafts. `failures`: those of `constraints.Masks`.
    """

    spans: tuple[SampleSpan, ...]
    tokens: Tensor
    finite: Tensor
    wants_logprobs: list[bool]
    num_top: list[int]
    logprobs: DeviceLogprobs | None
    num_accepted: Tensor | None
    failures: Mapping[int, tuple[int, str]] = field(default_factory=dict)

    def plain_tokens(self) -> tuple[int, ...] | None:
        """Return the token of each span, where each gave just one; None elsewhere."""
        is_plain = self.logprobs is None and self.num_accepted is None and not self.failures
        return tuple(self.tokens.tolist()) if is_plain and all(self.finite.tolist()) else None


@dataclass(slots=True)
class StepOutputs:
    """Hold the results of one forward of `batch`; `sampled`, `prompt_rows`, `unsampled` are indices
    of its rows.

    `prompt_logprobs`: per row of `prompt_rows`, its blocks in order. `finite`: bool [n], per row of
    `unsampled`.
    `probe_holds`: bool scalar, for a batch with a probe. `graph_use`: as in `StepResult`.
    """

    batch: Batch
    sampled: tuple[int, ...] = ()
    prompt_rows: tuple[int, ...] = ()
    unsampled: tuple[int, ...] = ()
    sampled_rows: SampledRows | None = None
    prompt_logprobs: list[list[DeviceLogprobs]] = field(default_factory=list)
    finite: Tensor | None = None
    probe_holds: Tensor | None = None
    graph_use: GraphUse | None = None

    def start_copies(self) -> None:
        """Queue the copies to pinned host memory behind the forward, without waiting.

        Otherwise reading would queue behind forwards that are launched in between.
        """
        if self.sampled_rows is not None:
            rows = self.sampled_rows
            self.sampled_rows = replace(
                rows,
                tokens=pinned(rows.tokens),
                finite=pinned(rows.finite),
                logprobs=None if rows.logprobs is None else rows.logprobs.map(pinned),
                num_accepted=None if rows.num_accepted is None else pinned(rows.num_accepted),
            )
        self.prompt_logprobs = [[b.map(pinned) for b in blocks] for blocks in self.prompt_logprobs]
        self.finite = None if self.finite is None else pinned(self.finite)
        self.probe_holds = None if self.probe_holds is None else pinned(self.probe_holds)

    def result(self, elapsed_s: float) -> StepResult:
        """Return the result of the step. Waits for tensors that are still on a device."""
        step = self.batch.step
        if self.batch.decoding is not None and self.sampled_rows is not None:
            tokens = self.sampled_rows.plain_tokens()
            if tokens is not None:
                return StepResult(step, (), elapsed_s, tokens=tokens, graph_use=self.graph_use)
        holds = None if self.probe_holds is None else bool(self.probe_holds)
        return StepResult(
            step, self.results(), elapsed_s, probe_holds=holds, graph_use=self.graph_use
        )

    def results(self) -> tuple[RowResult, ...]:
        """Return one result per row of the batch. Waits for tensors that are still on a device."""
        empty = RowResult((), (), (), finite=True)
        rows = self.batch.rows
        results = [empty] * len(rows)
        if self.finite is not None:
            for index, is_finite in zip(self.unsampled, self.finite.tolist(), strict=True):
                results[index] = structs.replace(empty, finite=is_finite)
        if self.sampled_rows is not None:
            for index, result in zip(
                self.sampled, _sampled_results(self.sampled_rows), strict=True
            ):
                results[index] = result
        for index, blocks in zip(self.prompt_rows, self.prompt_logprobs, strict=True):
            request = rows[index].prompt_logprobs
            assert request is not None, "only rows with prompt logprobs are listed"
            logprobs: list[TokenLogprob] = []
            for block in blocks:
                logprobs += block.to_host([request.num_top] * len(block.chosen))
            is_finite = all(s.logprob is not None and math.isfinite(s.logprob) for s in logprobs)
            results[index] = (
                structs.replace(results[index], prompt_logprobs=tuple(logprobs))
                if is_finite
                else RowResult((), (), tuple(logprobs), finite=False)
            )
        return tuple(results)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """Hold the result of a finished step. Implements `core.batch.PendingStep`."""

    result: StepResult

    def is_done(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> StepResult:
        """Return the result."""
        return self.result


@dataclass(frozen=True, slots=True)
class EventStep:
    """Track a step that runs on a CUDA stream. Implements `core.batch.PendingStep`."""

    outputs: StepOutputs
    started: torch.cuda.Event
    finished: torch.cuda.Event

    @classmethod
    def record(cls, execute: Callable[[], StepOutputs]) -> EventStep:
        """Run `execute`, which queues work on the current stream, between two events."""
        started, finished = _timing_event(), _timing_event()
        started.record()
        outputs = execute()
        outputs.start_copies()
        finished.record()
        return cls(outputs, started, finished)

    def is_done(self) -> bool:
        """Return whether the device has passed the last event."""
        return bool(self.finished.query())  # type: ignore[no-untyped-call]

    def wait(self) -> StepResult:
        """Wait for the device; its failure becomes the result's `error`."""
        try:
            self.finished.synchronize()
            elapsed_s = self.started.elapsed_time(self.finished) / 1e3
            return self.outputs.result(elapsed_s)
        except RuntimeError as error:
            return failed_step(self.outputs.batch.step, error, 0.0).wait()


def failed_step(step: int, error: BaseException, elapsed_s: float) -> FinishedStep:
    """Return the step of a forward that failed on the device.

    Raises:
        RuntimeError: the CUDA context is lost. Errors of kernels are sticky: every later forward
            would fail as well, and only another process can continue.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return FinishedStep(StepResult(step, (), elapsed_s, error=text))


def _sampled_results(rows: SampledRows) -> list[RowResult]:
    tokens, finite = rows.tokens.tolist(), rows.finite.tolist()
    accepted = [0] * len(rows.spans) if rows.num_accepted is None else rows.num_accepted.tolist()
    logprobs: list[TokenLogprob] = []
    if rows.logprobs is not None:
        pairs = zip(rows.spans, rows.num_top, strict=True)
        logprobs = rows.logprobs.to_host([k for span, k in pairs for _ in range(span.num_tokens)])
    results, first = [], 0
    for index, (span, wants) in enumerate(zip(rows.spans, rows.wants_logprobs, strict=True)):
        end, num_accepted = first + span.num_tokens, accepted[index]
        failed_at, reason = rows.failures.get(index, (span.num_tokens, ""))
        if not all(finite[first:end]):
            results.append(RowResult((), (), (), finite=False))
        elif failed_at <= num_accepted:
            results.append(RowResult((), (), (), finite=True, failure=reason))
        else:
            kept = slice(first, first + num_accepted + 1)
            own = tuple(logprobs[kept]) if wants else ()
            results.append(RowResult(tuple(tokens[kept]), own, (), finite=True))
        first = end
    return results


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned host memory, queued behind the device's work so far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
