"""Compose the engine's side: model, runner, cache and engine, from settings.

Separate from `wiring` because it imports torch, which the server process does not load.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import structs

from cache.capacity import BoundedPools
from cache.session_cache import SessionAwareCache
from cache.types import NULL_ROW, TurnId
from session_server.config import EngineSettings, Settings, model_directory
from session_server.core.batch import Batch, BatchRow, Runner, SamplingStart
from session_server.core.events import EngineReady
from session_server.core.grammar import GrammarCompiler
from session_server.core.sampling import SamplingParams
from session_server.engine.config import (
    Drafter,
    EngineConfig,
    MemoryPolicy,
    Speculation,
    TierPolicy,
    num_ahead,
)
from session_server.engine.engine import Engine
from session_server.engine_host.child import CannotStart, serve_engine
from session_server.engine_host.loop import EngineAssembly
from session_server.kv_tiers import check_tiers, keeps_files, make_tiers
from session_server.metrics.logging import configure_logging
from session_server.models.checkpoint_files import CheckpointFiles
from session_server.models.errors import DraftMismatch, ModelError
from session_server.models.hub import resolve_model
from session_server.parallel.loading import load_ranks
from session_server.runner import native
from session_server.runner.capacity import LargestForward, MemoryLimits
from session_server.runner.grammar_cache import GrammarCache
from session_server.runner.loader import (
    LoadedRunner,
    RunnerOptions,
    capture_graphs,
    load_runner,
)
from session_server.runner.survey import Survey, survey
from session_server.text.model_text import ModelTokens, load_model_tokens

_LOG: Final = logging.getLogger("session_server.engine")
_PROGRESS_INTERVAL_S: Final = 2.0
_NO_TOKENS: Final = np.empty(0, np.int32)

Report = Callable[[BaseException], None]
"""Told of what ends the engine; any thread may call it."""

CHUNK_S: Final = 0.1
"""Seconds that a forward of prompts should take, where the device lets it."""

CHUNK_SIZES: Final = (64, 128, 256, 512)
"""Tokens of prompts in a forward, to choose from: fewer do not pay for reading all weights."""

# A collection of the oldest generation walks every live object, also of idle sessions, and delays
# the step it happens in. Reference counts free what steps allocate; cycles are rare here.
_GC_THRESHOLDS: Final = (50_000, 50, 1_000)


def build_engine(settings: Settings) -> EngineAssembly:
    """Load the model, allocate its memory, and build the engine.

    Raises:
        ModelError: the checkpoint cannot be served.
        ValueError: the settings ask for what the machine or the model does not have.
    """
    check_tiers(settings)
    directory = model_directory(settings.model)
    tokens = load_model_tokens(directory)
    eos_token_ids = tuple(sorted(tokens.eos_token_ids))
    draft = _draft_directory(settings, tokens)
    options = replace(runner_options(settings), eos_token_ids=eos_token_ids, draft=draft)
    paths = filter(None, (directory, draft)) if keeps_files(settings) else ()
    checkpoints = [CheckpointFiles(path) for path in paths]
    started_s = time.monotonic()
    loaded, watch = _load(directory, options, settings.model.tensor_parallel_size)
    _log_model(loaded, time.monotonic() - started_s)
    _log_pools(loaded)
    fingerprint = _fingerprint(checkpoints)
    max_context_len = loaded.plan.capacity.max_context_len
    chunk_tokens = settings.engine.chunked_prefill_size or chunk_for(
        loaded.runner, max_context_len, is_linear=loaded.device == "cpu"
    )
    tiers = make_tiers(settings, loaded, fingerprint)
    engine = _make_engine(
        settings,
        loaded,
        eos_token_ids=eos_token_ids,
        fingerprint=fingerprint,
        chunk_tokens=chunk_tokens,
        tiers=tiers.policy,
    )
    if engine.max_turn_len < max_context_len:
        _LOG.warning(
            "KV memory is smaller than one context: serving %d tokens instead of %d; raise "
            "--mem-fraction-static or --max-total-tokens, or lower --pinned-fraction",
            engine.max_turn_len,
            max_context_len,
        )
    warm_up(loaded.runner, _speculation(settings))
    _prepare_device(loaded, settings)
    working_bytes = loaded.runner.reserve(chunk_tokens + settings.engine.max_running_turns)
    _LOG.info("a forward computes up to %d tokens of prompts", chunk_tokens)
    if working_bytes:  # torch allocates it forward by forward
        _LOG.info("layers work in %.1f MiB", working_bytes / 2**20)
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    grammars = GrammarCompiler(
        tokens.tokenizer.backend_tokenizer.to_str(),
        eos_token_ids=eos_token_ids,
        vocab_size=loaded.config.vocab_size,
    )
    ready = _ready(loaded, engine, eos_token_ids, tiers.policy)
    compile_ = GrammarCache(grammars).compile
    return EngineAssembly(engine, loaded.runner, ready, compile_, tiers.carrier, watch)


def _load(
    directory: Path, options: RunnerOptions, num_ranks: int
) -> tuple[LoadedRunner, Callable[[Report], None]]:
    """Load the model, over several ranks or here; return what reports a rank that ends, too."""
    progress = _progress_logger("loading weights %d of %d tensors")
    if num_ranks == 1:
        return load_runner(directory, options, progress=progress), lambda report: None
    loaded, ranks = load_ranks(directory, options, num_ranks, progress=progress)
    pids = " ".join(map(str, ranks.pids))
    _LOG.info("model is split over ranks=%d; processes of the others: %s", num_ranks, pids)
    return loaded, ranks.watch


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Describe what `build_engine` would build from the same settings.

    `max_turn_len`: tokens that a context may have, as in `EngineReady`.
    """

    found: Survey
    max_turn_len: int


def plan_service(settings: Settings, options: RunnerOptions | None = None) -> ServicePlan:
    """Plan what a server with these settings would serve; no weights are read.

    `options` replace those that the settings make.

    Raises:
        ModelError: the checkpoint cannot be served.
        ValueError: the settings ask for what the machine or the model does not have.
    """
    found = survey(model_directory(settings.model), options or runner_options(settings))
    engine = _make_engine(
        settings,
        found,
        eos_token_ids=(),
        fingerprint="",
        chunk_tokens=_max_chunk_tokens(settings),
    )
    return ServicePlan(found, engine.max_turn_len)


def _make_engine(
    settings: Settings,
    model: LoadedRunner | Survey,
    *,
    eos_token_ids: tuple[int, ...],
    fingerprint: str,
    chunk_tokens: int,
    tiers: TierPolicy | None = None,
) -> Engine:
    """Build cache and engine for a model; the device is not touched."""
    capacity = model.plan.capacity
    quota = int(max(capacity.num_pages.values()) * settings.cache.pinned_fraction)
    return Engine(
        SessionAwareCache(model.spec, capacity, pinned_quota_pages=quota),
        EngineConfig(
            model_fingerprint=fingerprint,
            vocab_size=model.config.vocab_size,
            eos_token_ids=eos_token_ids,
            max_running=settings.engine.max_running_turns,
            max_waiting=settings.sessions.max_sessions,
            max_sessions=settings.sessions.max_sessions * 2,
            chunk_tokens=chunk_tokens,
            # A CPU computes nothing while the host plans: a forward launched ahead would only keep
            # new turns and cancels waiting for it.
            num_in_flight=2 if settings.engine.overlap and model.device != "cpu" else 1,
            speculation=_speculation(settings),
            tiers=tiers or TierPolicy(),
            retract_interval=settings.debug.retract_interval,
            memory=MemoryPolicy(settings.cache.memory_check, settings.cache.probe_interval_s),
        ),
        stopwatch=time.perf_counter,
    )


def _log_model(loaded: LoadedRunner, elapsed_s: float) -> None:
    _LOG.info(
        "model loaded seconds=%.1f device=%s dtype=%s kv_dtype=%s kv_mib=%.0f kv_from=%s",
        elapsed_s,
        loaded.device,
        loaded.dtype,
        loaded.kv_dtype,
        loaded.plan.kv_bytes / 2**20,
        loaded.plan.reason,
    )
    if loaded.quantization is not None:
        _LOG.info("weights are quantized: %s", loaded.quantization)
    if loaded.device == "cpu" and loaded.runner.backend_name == "cpu":
        why = native.WHY_MISSING or "--attention-backend or --tensor-parallel-size asks for it"
        _LOG.warning("torch computes: %s", why)


def _prepare_device(loaded: LoadedRunner, settings: Settings) -> None:
    """Compile what a GPU computes, capture what it computes in nearly every step, and say what
    came of it."""
    if loaded.runner.backend_name != "triton" or loaded.device == "cpu":
        return
    started_s = time.monotonic()
    loaded.runner.compile_kernels()
    _LOG.info("kernels are compiled, after %.1f s", time.monotonic() - started_s)
    largest = min(settings.model.cuda_graph_max_bs, settings.engine.max_running_turns)
    if not largest:
        return
    started_s = time.monotonic()
    told = capture_graphs(
        loaded,
        largest,
        _speculation(settings).num_drafts,
        on_progress=_progress_logger("capturing CUDA graphs %d of %d"),
    )
    _LOG.info("%s, after %.1f s", told, time.monotonic() - started_s)


def _fingerprint(checkpoints: Sequence[CheckpointFiles]) -> str:
    """Return what tells KV of one model from that of any other: "" where no other will meet it."""
    if not checkpoints:
        return ""
    started_s = time.monotonic()
    fingerprint = " ".join(checkpoint.digest() for checkpoint in checkpoints)
    elapsed_s = max(time.monotonic() - started_s, 1e-3)
    num_gb = sum(checkpoint.num_bytes for checkpoint in checkpoints) / 1e9
    line = "hashed the model for KV on disk gb=%.2f seconds=%.1f gb_per_s=%.2f"
    _LOG.info(line, num_gb, elapsed_s, num_gb / elapsed_s)
    return fingerprint


def _log_pools(loaded: LoadedRunner) -> None:
    plan, spec = loaded.plan, loaded.spec
    capacity = plan.capacity
    if loaded.device != "cpu":
        line = "memory activations_mib=%.0f page_tables_mib=%.0f kv_mib=%.0f"
        sizes = (plan.activation_bytes, plan.table_bytes, plan.kv_bytes)
        _LOG.info(line, *(num_bytes / 2**20 for num_bytes in sizes))
    for pool, num_pages in capacity.num_pages.items():
        num_tokens = (num_pages - 1) * spec.page_size
        line = "kv pool=%s pages=%d tokens=%d mib=%.1f"
        _LOG.info(line, pool, num_pages, num_tokens, plan.pool_bytes[pool] / 2**20)
    if num_states := capacity.num_states:
        mib = num_states * spec.bytes_per_state / 2**20
        _LOG.info("kv states=%d rows=%d mib=%.1f", num_states, capacity.num_rows, mib)


def _speculation(settings: Settings) -> Speculation:
    if settings.engine.speculation == "off":
        return Speculation()
    return Speculation(settings.engine.num_draft_tokens, Drafter(settings.engine.speculation))


def run_engine_process(fd: int) -> int:
    """Run the engine process: serve the inherited socket `fd` until it is told to exit."""
    return serve_engine(fd, _build_from_frame)


def _build_from_frame(frame: bytes) -> EngineAssembly:
    settings = EngineSettings.model_validate_json(frame)
    # Whether colors are wanted is known to the server alone, and few lines are written here.
    configure_logging(settings.http.log_level, settings.http.log_format, allows_color=False)
    try:
        return build_engine(settings)
    except (ModelError, ValueError) as error:
        raise CannotStart(str(error)) from error


def chunk_for(runner: Runner, max_context_len: int, *, is_linear: bool) -> int:
    """Return how many tokens of prompts a forward may compute to take about `CHUNK_S`.

    Others wait for it between two of their tokens. `is_linear`: the time of a few tokens tells that
    of more, as on a CPU. On a GPU a forward of few tokens takes the time of its launches, so that
    each size is timed, the largest first.
    """

    def timed_s(num_tokens: int) -> float:
        return min(_run_padding(runner, _padding(num_tokens)) for _ in range(2))

    num_timed = min(CHUNK_SIZES[0], max_context_len)
    if is_linear:
        token_s = timed_s(num_timed) / num_timed
        quick = [size for size in CHUNK_SIZES if size * token_s <= CHUNK_S]
        return max(quick, default=CHUNK_SIZES[0])
    sizes = (size for size in reversed(CHUNK_SIZES) if size <= max_context_len)
    return next((size for size in sizes if timed_s(size) <= CHUNK_S), CHUNK_SIZES[0])


def warm_up(runner: Runner, speculation: Speculation) -> None:
    """Run padding through the model, so that no client waits for kernels to be chosen.

    The shapes are those of a prefill, a decode and a batch, with and without drafts. They only
    write row 0 and page 0, which are padding.
    """
    start = SamplingStart(SamplingParams(temperature=0.0), 0, 0, _NO_TOKENS, _NO_TOKENS)
    shapes = [(1, 1, 0), (1, 8, 0), (2, 1, 0), (4, 1, 0), (8, 1, 0)]
    if num_drafts := speculation.num_drafts:
        shapes += [(num_rows, 1, num_drafts) for num_rows in (1, 2, 4, 8)]
    for num_rows, num_tokens, num_drafts in shapes:
        has_host_drafts = num_drafts > 0 and speculation.drafter is Drafter.NGRAM
        drafts = np.zeros(num_drafts, np.int32) if has_host_drafts else None
        row = structs.replace(
            _padding(num_tokens),
            num_tokens=num_tokens + num_drafts,
            sample=True,
            sampling=start,
            num_drafts=num_drafts,
            drafts=drafts,
        )
        _run_padding(runner, row, num_rows)


def _padding(num_tokens: int) -> BatchRow:
    """Return a row that computes padding, in row 0 and page 0."""
    return BatchRow(
        turn_id=TurnId("warm-up"),
        attempt=0,
        row=NULL_ROW,
        start=0,
        num_tokens=num_tokens,
        tokens=np.zeros(num_tokens, np.int32),
        sample=False,
        sampling=None,
    )


def _run_padding(runner: Runner, row: BatchRow, num_rows: int = 1) -> float:
    """Run a forward of equal rows; return its seconds.

    Raises:
        RuntimeError: the device refuses.
    """
    result = runner.launch(Batch(step=0, listed=(row,) * num_rows, table_writes=())).wait()
    if result.error is not None:
        raise RuntimeError(f"the model does not run: {result.error}")
    return result.forward_s


def _progress_logger(line: str) -> Callable[[int, int], None]:
    """Return a callback that logs progress, at most every `_PROGRESS_INTERVAL_S`.

    `line`: what is done, and of how many.
    """
    logged_s = time.monotonic()

    def report(num_done: int, num_wanted: int) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s >= _PROGRESS_INTERVAL_S:
            logged_s = time.monotonic()
            _LOG.info(line, num_done, num_wanted)

    return report


def _draft_directory(settings: Settings, tokens: ModelTokens) -> Path | None:
    """Return the directory of the draft model; None without speculation by a model."""
    if settings.engine.speculation != Drafter.MODEL.value:
        return None
    if settings.model.draft_path is None:
        raise ValueError("--speculative-algorithm model needs --speculative-draft-model-path")
    directory = resolve_model(settings.model.draft_path)
    try:
        known = load_model_tokens(directory).tokenizer.vocabulary
    except ModelError as error:
        raise DraftMismatch(f"the draft model in {directory}: {error}") from error
    if known != tokens.tokenizer.vocabulary:
        raise DraftMismatch(
            f"the model in {directory} cannot draft for the one in "
            f"{model_directory(settings.model)}: its tokenizer has other tokens or other ids"
        )
    return directory


def runner_options(settings: Settings) -> RunnerOptions:
    """Return the runner's options that the settings decide; the rest is the checkpoint's."""
    model, cache = settings.model, settings.cache
    return RunnerOptions(
        page_size=cache.page_size,
        num_rows=cache.max_resident_sessions,
        device=model.device,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        max_context_len=model.context_length,
        memory=MemoryLimits(
            cache.memory_fraction,
            cache.max_total_tokens,
            _bounded_pools(settings),
            largest=_largest_forward(settings),
        ),
        backend=model.attention_backend,
        num_threads=model.threads,
        quantize=model.quantize,
    )


def _bounded_pools(settings: Settings) -> BoundedPools:
    engine, num_drafts = settings.engine, _speculation(settings).num_drafts
    ahead = num_ahead(
        chunk_tokens=_max_chunk_tokens(settings),
        num_in_flight=2 if engine.overlap else 1,
        num_drafts=num_drafts,
    )
    return BoundedPools(ahead, num_drafts, settings.cache.window_ratio)


def _largest_forward(settings: Settings) -> LargestForward:
    speculation = _speculation(settings)
    return LargestForward(
        _max_chunk_tokens(settings),
        settings.engine.max_running_turns,
        speculation.num_drafts,
        makes_drafts=speculation.drafter is Drafter.MODEL,
    )


def _max_chunk_tokens(settings: Settings) -> int:
    """Return the most prompt tokens of a forward, whatever `chunk_for` will choose."""
    return settings.engine.chunked_prefill_size or CHUNK_SIZES[-1]


def _ready(
    loaded: LoadedRunner, engine: Engine, eos_token_ids: tuple[int, ...], tiers: TierPolicy
) -> EngineReady:
    capacity = loaded.plan.capacity
    return EngineReady(
        epoch=1,
        max_turn_len=engine.max_turn_len,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=eos_token_ids,
        page_size=loaded.spec.page_size,
        num_pages=max(capacity.num_pages.values()),
        device=loaded.device,
        dtype=loaded.dtype,
        backend=_backend(loaded),
        kv_tiers="disk" if tiers.disk_bytes else "host" if tiers.host_bytes else "none",
    )


def _backend(loaded: LoadedRunner) -> str:
    """Name what computes, and of our kernels the instruction set."""
    name = loaded.runner.backend_name
    return f"{name}/{native.cpu_name()}" if name == "native" else name
