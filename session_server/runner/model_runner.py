"""Execute batches in launch order: table writes, inputs, forward, sampling, results.

With a draft model, its forwards come first: they write its own KV and propose the drafts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Protocol, cast

import torch
from torch import Tensor

from cache.pool.page_copy import PagedTensor
from cache.pool.page_table import PageTable, apply_writes
from cache.pool.recurrent import StatePool
from cache.pool.storage import KvPool
from cache.pool.upload import upload
from cache.spec import CacheSpec, Capacity, LayerKind
from cache.types import PoolName, TableWrite, pages_for
from session_server.core.batch import Batch, PendingStep, Probe
from session_server.models.config import KvDTypeName
from session_server.models.decoder import Decoder
from session_server.runner.constraints import Constraints, Masks
from session_server.runner.decode_graphs import DecodeGraphs, GraphApi
from session_server.runner.device import as_current
from session_server.runner.draft_model import DraftModel, without_missing_drafts
from session_server.runner.graph_sizes import GraphSize
from session_server.runner.inputs import ForwardInputs, InputBuilder
from session_server.runner.logprobs import DeviceLogprobs, token_logprobs
from session_server.runner.outputs import (
    EventStep,
    FinishedStep,
    SampledRows,
    StepOutputs,
    failed_step,
)
from session_server.runner.paged_decoder import BackendName, PagedDecoder
from session_server.runner.probe import probe_holds
from session_server.runner.sampler import Sampler
from session_server.runner.verification import verify

PROMPT_LOGPROB_BLOCK: Final = 128
"""Prompt positions whose logits are computed at a time: [128, vocab], not [prompt, vocab]."""


class OtherRanks(Protocol):
    """Stand for the ranks that hold the other parts of a model."""

    def write(self, writes: Sequence[TableWrite]) -> None:
        """Apply table writes before the next forward."""

    def probe(self, probe: Probe, check: Callable[[], Tensor]) -> Tensor:
        """Have every rank probe a page; return whether it holds on all, a bool scalar.

        `check`: probes it on this rank; its forward is not accompanied.
        """
        ...

    def accompany(self, model: int, inputs: ForwardInputs) -> AbstractContextManager[None]:
        """Begin a forward of a model; the context is this rank's part of it.

        What fails in the context leaves the ranks out of step and raises what ends the engine.
        """
        ...


class ModelRunner:
    """Run one model on one device, with its KV pools. Implements `core.batch.Runner`.

    Not thread-safe: one thread launches. Owns the pools, the device page tables and the sampler's
    state. The cache decides who may write which page, through the table writes of the batches.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: CacheSpec,
        capacity: Capacity,
        *,
        backend: BackendName = "auto",
        eos_token_ids: tuple[int, ...] = (),
        draft: Decoder | None = None,
    ) -> None:
        """Allocate the pools; arguments as those of `PagedDecoder`.

        `capacity`: the same that the cache uses. `eos_token_ids`: held back until a turn's
        `min_tokens`. `draft`: proposes the drafts that rows do not bring; has the same vocabulary,
        device and dtype.
        """
        device, page_size, num_rows = decoder.device, spec.page_size, capacity.num_rows
        max_pages = pages_for(capacity.max_context_len, page_size)
        self._tables = {
            group.pool: PageTable(num_rows, max_pages, device=device)
            for group in spec.groups
            if group.kind is not LayerKind.RECURRENT
        }
        self._model = PagedDecoder(decoder, spec, capacity, tables=self._tables, backend=backend)
        self._last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._inputs = InputBuilder(
            self._tables, page_size=page_size, last_tokens=self._last_tokens
        )
        self._sampler = Sampler(
            decoder.config.vocab_size,
            device=device,
            eos_token_ids=eos_token_ids,
            has_kernels=self._model.backend_name == "triton",
        )
        self._constraints = Constraints(decoder.config.vocab_size, eos_token_ids)
        self._draft: DraftModel | None = None
        if draft is not None:
            assert draft.config.vocab_size == decoder.config.vocab_size, "one sampler for both"
            kv_dtype = cast(KvDTypeName | None, spec.kv_dtype)
            draft_spec = draft.config.cache_spec(page_size, draft.dtype_name, kv_dtype)
            model = PagedDecoder(draft, draft_spec, capacity, tables=self._tables, backend=backend)
            self._draft = DraftModel(model, self._tables, self._sampler, num_rows=num_rows)
        self._others: OtherRanks | None = None

    def lead(self, others: OtherRanks) -> None:
        """Have other ranks compute every forward along, each with its part of the models."""
        self._others = others
        for index, model in enumerate(self._models):
            model.accompany = partial(others.accompany, index)

    def capture_graphs(
        self,
        sizes: Sequence[GraphSize],
        api: GraphApi,
        *,
        on_progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> str | None:
        """Capture the model's forwards of these sizes, and the draft model's of one token a row.
        Return why not, if so; see `PagedDecoder.capture_graphs`.

        `on_progress` is told how many are done, and of how many.
        """
        single = [size for size in sizes if size.max_row_tokens == 1]
        wanted = [(self._model, sizes)]
        if self._draft is not None:
            wanted.append((self._draft.model, single))
        num_done, num_wanted = itertools.count(1), sum(len(of_model) for _, of_model in wanted)
        with torch.inference_mode(), self._on_device():
            for model, of_model in wanted:
                why_not = model.capture_graphs(
                    of_model, api, lambda _: on_progress(next(num_done), num_wanted)
                )
                if why_not is not None:
                    return why_not
        self._inputs.max_row_tokens = max((size.max_row_tokens for size in sizes), default=0)
        if self._draft is not None:
            self._draft.use_graphs()
        return None

    def compile_kernels(self) -> None:
        """Compile the kernels that forwards may launch; see `PagedDecoder.compile_kernels`."""
        with torch.inference_mode(), self._on_device():
            for model in self._models:
                model.compile_kernels()
                if self._others is None:  # they would have to compute it along
                    self._sampler.compile_kernels(model.logits(model.compute_padding()))

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the runner's device the current one."""
        return as_current(self._last_tokens.device)

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Return the graphs of the model's forwards; None without."""
        return self._model.graphs

    @property
    def _models(self) -> list[PagedDecoder]:
        """Return the model, then the draft model if there is one."""
        return [self._model] if self._draft is None else [self._model, self._draft.model]

    @property
    def pools(self) -> Mapping[PoolName, KvPool]:
        """Return the model's KV pools."""
        return self._model.pools

    @property
    def states(self) -> StatePool | None:
        """Return the pool of recurrent states; None if the model has none."""
        return self._model.states

    def paged_tensors(self) -> Mapping[PoolName, Sequence[PagedTensor]]:
        """Return what is kept of a page, by pool: the model's, then the draft model's."""
        tensors: dict[PoolName, list[PagedTensor]] = {}
        for model in self._models:
            for pool, each in model.pools.items():
                tensors.setdefault(pool, []).append(PagedTensor(each.storage, each.page_axis))
            if (states := model.states) is not None:
                parts = [PagedTensor(part, states.page_axis) for part in states.storage]
                tensors.setdefault(states.name, []).extend(parts)
        return tensors

    @property
    def backend_name(self) -> str:
        """Return the name of the attention backend."""
        return self._model.backend_name

    def reserve(self, num_tokens: int) -> int:
        """Allocate what forwards of up to so many tokens work in, those of the draft model
        included, and return its bytes; see `PagedDecoder.reserve`.

        Raises:
            MemoryError: the system has less.
        """
        of_draft = 0 if self._draft is None else self._draft.reserve(num_tokens)
        return self._model.reserve(num_tokens) + of_draft

    def launch(self, batch: Batch) -> PendingStep:
        """Start one forward; on a CPU, finish it.

        A device error, such as out of memory, becomes the `error` of the step's result. A lost
        device raises, see `failed_step`.
        """
        started = time.perf_counter()
        try:
            with torch.inference_mode(), self._on_device():
                if self._last_tokens.device.type == "cuda":
                    return EventStep.record(lambda: self._execute(batch))
                outputs = self._execute(batch)
                result = outputs.result(time.perf_counter() - started)
        except (RuntimeError, MemoryError, IndexError) as error:
            return failed_step(batch.step, error, time.perf_counter() - started)
        return FinishedStep(result)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Return the logits that `launch` of this batch computes, without sampling.

        Idempotent: it writes the KV that `launch` writes again. Rows with missing drafts must have
        been started by an earlier forward.

        Returns:
            float32 [n, vocab]: sampled positions in the order of the batch, then those of prompt
                logprobs.
        """
        with self._on_device():
            self._apply_table_writes(batch.table_writes)
            inputs, _ = self._build(batch)
            hidden = self._model.forward(inputs, inputs.logits_indices)
            return self._model.logits(hidden[: len(hidden) - len(inputs.unsampled)])

    def _apply_table_writes(self, writes: Sequence[TableWrite]) -> None:
        if self._others is not None:
            self._others.write(writes)
        apply_writes(self._tables, writes)

    def _execute(self, batch: Batch) -> StepOutputs:
        for ended in batch.ended:
            self._sampler.end(ended)
            self._constraints.end(ended)
        self._apply_table_writes(batch.table_writes)
        for row in batch.listed:  # a row that decodes goes on with its sampler's state
            if row.sampling is not None:
                self._sampler.start(row.row, row.sampling)
                self._constraints.start(row.row, row.sampling)
        if batch.probe is not None:
            return StepOutputs(batch, probe_holds=self._probe(batch.probe))
        if not (batch.listed or batch.decoding):
            return StepOutputs(batch)
        inputs, drafts = self._build(batch)
        masks = None
        if self._constraints.constrain(inputs.sample_spans):
            sampled = [batch.rows[index] for index in inputs.sampled]
            masks = self._constraints.ask(sampled, inputs.sample_spans, drafts)
        hidden = self._model.forward(inputs, inputs.logits_indices)
        num_choices = inputs.num_choices
        outputs = StepOutputs(batch, inputs.sampled, inputs.prompt_rows, inputs.unsampled)
        outputs.graph_use = None if self.graphs is None else self.graphs.last_use
        if num_choices:
            outputs.sampled_rows = self._sample(inputs, hidden[:num_choices], masks)
        if inputs.prompt_rows:
            outputs.prompt_logprobs = self._prompt_logprobs(batch, inputs, hidden[num_choices:])
        if inputs.unsampled:
            # The last position has read the row's whole KV, so NaN or Inf in it appears here.
            outputs.finite = hidden[-len(inputs.unsampled) :].sum(dim=-1).isfinite()
        return outputs

    def _probe(self, probe: Probe) -> Tensor:
        check = partial(probe_holds, probe, self._model, self._tables)
        return check() if self._others is None else self._others.probe(probe, check)

    def _build(self, batch: Batch) -> tuple[ForwardInputs, Tensor | None]:
        """Return the inputs of the forward, and the drafts that the draft model made for it."""
        if self._draft is None:
            return self._inputs.build(batch), None
        certain = self._inputs.build(without_missing_drafts(batch))
        drafts = self._draft.propose(certain, batch)
        return (certain if drafts is None else self._inputs.build(batch, drafts)), drafts

    def _sample(
        self, inputs: ForwardInputs, hidden: Tensor, asked: Future[Masks] | None
    ) -> SampledRows:
        spans, rows = inputs.sample_spans, inputs.sample_rows
        logits = self._model.logits(hidden)
        num_accepted = None
        masks = None if asked is None else asked.result()
        if len(hidden) == len(spans):
            tokens, finite = self._sampler.choose(logits, spans, masks=masks)
            self._sampler.count_outputs(spans, tokens)
            self._last_tokens.index_copy_(0, rows, tokens)
        else:
            input_ids = inputs.token_ids[inputs.logits_indices[: len(hidden)]]
            tokens, finite = self._sampler.choose(logits, spans, input_ids, masks=masks)
            acceptance = verify(tokens, input_ids, spans)
            self._sampler.count_outputs(spans, tokens, acceptance.num_accepted)
            self._last_tokens.index_copy_(0, rows, tokens[acceptance.last])
            num_accepted = acceptance.num_accepted
        if asked is not None:
            self._constraints.advance(spans, tokens, num_accepted)
        sampling = [self._sampler.params(span.row) for span in spans]
        wants = [params.logprobs for params in sampling]
        num_top = [params.top_logprobs if params.logprobs else 0 for params in sampling]
        logprobs = token_logprobs(logits, tokens, num_top=max(num_top)) if any(wants) else None
        sampled = SampledRows(spans, tokens, finite, wants, num_top, logprobs, num_accepted)
        if masks is not None:
            sampled.failures = masks.failures
        return sampled

    def _prompt_logprobs(
        self, batch: Batch, inputs: ForwardInputs, hidden: Tensor
    ) -> list[list[DeviceLogprobs]]:
        """Return the prompt logprobs of each row that asks for them, block by block."""
        prompt_logprobs: list[list[DeviceLogprobs]] = []
        offset = 0
        for index in inputs.prompt_rows:
            request = batch.rows[index].prompt_logprobs
            assert request is not None, "only rows with prompt logprobs are listed"
            targets = upload(torch.from_numpy(request.targets).long(), hidden.device)
            blocks = []
            for first in range(0, len(targets), PROMPT_LOGPROB_BLOCK):
                of_block = targets[first : first + PROMPT_LOGPROB_BLOCK]
                logits = self._model.logits(hidden[offset : offset + len(of_block)])
                blocks.append(token_logprobs(logits, of_block, num_top=request.num_top))
                offset += len(of_block)
            prompt_logprobs.append(blocks)
        return prompt_logprobs
