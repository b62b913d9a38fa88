"""Compute figures of a checkpoint and its sessions: those that the server itself uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cache.components import components_of, pages_at_rest
from session_server.models.config import (
    AttentionConfig,
    LayerConfig,
    MlaConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from session_server.runner.survey import Survey

DEFAULT_LENGTHS: Final = (1024, 8192, 32_768, 131_072)
"""Session lengths in tokens to report by default, up to the context length."""

ASSUMED: Final = "reads E4M3, as GPUs of compute capability 8.9 and newer do"
"""What is assumed of a GPU that is not here."""


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Describe layers that are alike. Sizes that a kind does not have are 0.

    `layers`: indices. `window`: positions a token attends to. `head_dim`: elements stored per head.
    `ffn_size`: of a dense layer, or of one expert. `shared_size`: of the shared expert.
    """

    layers: tuple[int, ...]
    kind: str
    window: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_experts: int
    num_chosen_experts: int
    shared_size: int


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """Describe the model.

    `dtype`: of the computation; `stored_dtype`: of the files, according to the configuration.
    `active_parameters`: those that one token uses. `stored_bytes`: of the files; `weight_bytes`: of
    the weights in memory. `context_len`: longest context here; `model_context_len`: that of the
    model.
    """

    path: str
    model_type: str
    stored_dtype: str
    dtype: str
    device: str
    parameters: int
    active_parameters: int
    stored_bytes: int
    weight_bytes: int
    vocab_size: int
    hidden_size: int
    context_len: int
    model_context_len: int


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Describe one pool.

    `dtype`: of stored elements. `bytes_per_token`: over all layers of the pool, 0 if a page is a
    state. `pages`: the padding page included.
    """

    name: str
    kind: str
    window: int
    dtype: str
    num_layers: int
    bytes_per_token: int
    page_size: int
    pages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Describe a parked session of `length` tokens, by pool.

    `fit`: how many such sessions are held at the same time; 0 if `is_too_long` for the context.
    """

    length: int
    pages: dict[str, int]
    bytes: dict[str, int]
    fit: int
    is_too_long: bool


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Describe the memory for KV.

    `kv_bytes`: of all pools, out of `free_bytes`; `reason`: what limits it. `rows`: sessions that
    can hold KV at the same time.
    """

    free_bytes: int
    kv_bytes: int
    reason: str
    rows: int


@dataclass(frozen=True, slots=True)
class Report:
    """Hold what `session-server inspect` prints. `assumed`: of a device that is not here."""

    model: ModelFigures
    layers: tuple[LayerFigures, ...]
    pools: tuple[PoolFigures, ...]
    memory: MemoryFigures
    sessions: tuple[SessionFigures, ...]
    assumed: str


def make_report(
    path: str, survey: Survey, lengths: Sequence[int] = (), *, max_turn_len: int | None = None
) -> Report:
    """Compute the report.

    Args:
        path: of the checkpoint, as given.
        survey: what the checkpoint's headers say.
        lengths: tokens of the sessions to describe; empty for the default lengths.
        max_turn_len: longest context in tokens; None for all that a row addresses.
    """
    config, plan = survey.config, survey.plan
    context_len = plan.capacity.max_context_len if max_turn_len is None else max_turn_len
    return Report(
        model=ModelFigures(
            path=path,
            model_type=config.model_type,
            stored_dtype=config.dtype,
            dtype=survey.dtype,
            device=survey.device,
            parameters=survey.num_parameters,
            active_parameters=survey.num_parameters - num_inactive_parameters(config),
            stored_bytes=survey.stored_bytes,
            weight_bytes=survey.weight_bytes,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            context_len=context_len,
            model_context_len=config.max_position_embeddings,
        ),
        layers=_layers(config),
        pools=_pools(survey),
        memory=MemoryFigures(plan.free_bytes, plan.kv_bytes, plan.reason, plan.capacity.num_rows),
        sessions=tuple(
            session_figures(survey, length, max_turn_len=context_len)
            for length in lengths or default_lengths(context_len)
        ),
        assumed="" if survey.is_here else ASSUMED,
    )


def default_lengths(context_len: int) -> tuple[int, ...]:
    """Return the default lengths below `context_len`, then `context_len` itself."""
    return (*(length for length in DEFAULT_LENGTHS if length < context_len), context_len)


def session_figures(
    survey: Survey, length: int, *, max_turn_len: int | None = None
) -> SessionFigures:
    """Compute what a parked session of `length` tokens uses, and how many fit."""
    page_size, capacity = survey.spec.page_size, survey.plan.capacity
    pages = {
        component.pool: pages_at_rest(component, length, page_size)
        for component in components_of(survey.spec)
    }
    page_bytes = survey.spec.pool_bytes_per_page
    # Page 0 of every pool is padding.
    held = capacity.pool_pages(survey.spec)
    fitting = min((held[pool] - 1) // num for pool, num in pages.items())
    is_too_long = length > (max_turn_len or capacity.max_context_len)
    return SessionFigures(
        length=length,
        pages={str(pool): num for pool, num in pages.items()},
        bytes={str(pool): num * page_bytes[pool] for pool, num in pages.items()},
        fit=0 if is_too_long else min(fitting, capacity.num_rows),
        is_too_long=is_too_long,
    )


def num_inactive_parameters(config: ModelConfig) -> int:
    """Return the parameters of the experts that one token is not routed to."""
    return sum(
        (layer.ffn.num_experts - layer.ffn.num_experts_per_tok)
        * _num_parameters(layer.ffn.expert, config.hidden_size)
        for layer in config.layers
        if isinstance(layer.ffn, MoeConfig)
    )


def _num_parameters(mlp: MlpConfig, hidden: int) -> int:
    inner = mlp.intermediate_size
    return 3 * inner * hidden + (2 * inner + hidden if mlp.bias else 0)


def _layers(config: ModelConfig) -> tuple[LayerFigures, ...]:
    by_figures: dict[LayerFigures, list[int]] = {}
    for index, layer in enumerate(config.layers):
        by_figures.setdefault(_figures(layer), []).append(index)
    return tuple(replace(figures, layers=tuple(layers)) for figures, layers in by_figures.items())


def _figures(layer: LayerConfig) -> LayerFigures:
    mixer, ffn = layer.mixer, layer.ffn
    group = mixer.group((), "float32")
    moe = ffn if isinstance(ffn, MoeConfig) else None
    shared = moe.shared_expert if moe else None
    return LayerFigures(
        layers=(),
        kind=group.kind.value,
        window=group.window,
        num_heads=mixer.num_heads if isinstance(mixer, AttentionConfig | MlaConfig) else 0,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        ffn_size=(ffn.expert if isinstance(ffn, MoeConfig) else ffn).intermediate_size,
        num_experts=moe.num_experts if moe else 0,
        num_chosen_experts=moe.num_experts_per_tok if moe else 0,
        shared_size=shared.intermediate_size if shared else 0,
    )


def _pools(survey: Survey) -> tuple[PoolFigures, ...]:
    page_size, num_pages = survey.spec.page_size, survey.plan.capacity.pool_pages(survey.spec)
    return tuple(
        PoolFigures(
            name=str(group.pool),
            kind=group.kind.value,
            window=group.window,
            dtype="float32" if group.state_shapes else group.kv_dtype or survey.dtype,
            num_layers=len(group.layers),
            bytes_per_token=group.bytes_per_token,
            page_size=page_size,
            pages=num_pages[group.pool],
            bytes=survey.plan.pool_bytes[group.pool],
        )
        for group in survey.spec.groups
    )
