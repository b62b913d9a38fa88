"""Give a decoder's layers to the kernels, which then compute a forward in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, assert_never, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache.pool.mla import MlaPool
from cache.pool.page_table import PageTable
from cache.pool.recurrent import StatePool
from cache.pool.storage import KvPool
from cache.types import NULL_PAGE, PoolName, StateMoves
from session_server.attention.base import Span
from session_server.models.config import (
    AttentionConfig,
    GateConfig,
    MlpConfig,
    MoeConfig,
    ScoringFunc,
)
from session_server.models.decoder import Decoder, Norms, capped
from session_server.models.layers.attention import GqaMixer
from session_server.models.layers.gated_delta import GatedDeltaMixer
from session_server.models.layers.linear import Linear
from session_server.models.layers.mamba2 import Mamba2Mixer
from session_server.models.layers.mla import MlaMixer
from session_server.models.layers.mlp import GatedMlp
from session_server.models.layers.moe import MixtureOfExperts, SerialExperts
from session_server.models.layers.norm import ProjectionNorm, RmsNorm, Scale
from session_server.models.layers.short_conv import ShortConvMixer
from session_server.runner.inputs import ForwardInputs
from session_server.runner.native import _native
from session_server.runner.native.linear import FORMATS, NativeLinear, pack, packed

_NO_STATES: Final = np.empty(0, dtype=np.int64)


class NativeDecoder:
    """Compute forwards of one decoder over its pools."""

    def __init__(
        self,
        decoder: Decoder,
        pools: Mapping[PoolName, KvPool],
        states: StatePool | None,
        tables: Mapping[PoolName, PageTable],
    ) -> None:
        """Take over weights, pools and tables, without a copy where weights are packed already."""
        self._hidden_size = decoder.config.hidden_size
        self._softcap = decoder.config.final_logit_softcapping
        self._head = NativeLinear(packed(decoder.head))
        # The slots of a pool stand at its index, so pools of positions come first.
        self._pools = tuple(pools)
        indices = {name: index for index, name in enumerate(self._pools)}
        ropes = [(_floats(rope.frequencies), float(rope.factor)) for rope in decoder.ropes]
        embedding = decoder.embedding.detach()
        norm = _norm(decoder.norm)
        self._decoder = _native.Decoder(embedding, decoder.embedding_scale, norm, ropes)
        for name, pool in pools.items():
            is_latent = isinstance(pool, MlaPool)
            value_dim = pool.kv_lora_rank if isinstance(pool, MlaPool) else 0
            self._decoder.add_pool(pool.storage, is_latent, value_dim, tables[name].host)
        if states is not None:
            indices[states.name] = len(indices)
            self._decoder.add_states([part.numpy() for part in states.storage])
        self._has_states = states is not None
        # The kernels have addresses of these.
        self._alive = (embedding, tuple(pools.values()), states, tuple(tables.values()))
        configs = decoder.config.layers
        for (layer, rope, pool_name), config in zip(decoder.layers, configs, strict=True):
            mixer = cast(Any, layer.mixer)
            self._decoder.add_layer(
                _norms(layer.mixer_norms),
                _mixer(mixer, rope),
                _norms(layer.ffn_norms),
                _ffn(cast(Any, layer.ffn), config.ffn),
                (indices[pool_name], mixer.layer),
            )

    def reserve(self, num_tokens: int) -> int:
        """Allocate what forwards of up to so many tokens work in, and return its bytes.

        Raises:
            MemoryError: the system has less.
        """
        return self._decoder.reserve(num_tokens)

    def forward(self, inputs: ForwardInputs, wanted: Tensor) -> Tensor:
        """Compute every token and write its KV.

        Returns:
            float32 [n, hidden], normalized for the LM head, of the tokens `wanted`, int64 [n].

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        spans = inputs.attention.spans
        hidden = torch.empty((len(wanted), self._hidden_size), dtype=torch.float32)
        slots = inputs.attention.slot_mapping
        self._decoder.forward(
            inputs.token_ids.numpy(),
            inputs.positions.numpy(),
            np.stack([slots[name].numpy() for name in self._pools])
            if len(self._pools) != 1
            else slots[self._pools[0]].numpy(),
            np.array([(s.row, s.start, s.num_tokens, s.offset) for s in spans], dtype=np.int64),
            _states(spans) if self._has_states else _NO_STATES,
            wanted.numpy(),
            hidden.numpy(),
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the scores of the next token: float32 [n, hidden] -> float32 [n, vocab]."""
        return capped(self._head(hidden), self._softcap)


def _states(spans: tuple[Span, ...]) -> NDArray[np.int64]:
    """Return the states that rows read and write, as the kernels read them."""
    numbers: list[int] = []
    for span in spans:
        moves = span.states or StateMoves(NULL_PAGE, ((span.end, NULL_PAGE),))
        numbers += (moves.source, len(moves.targets))
        for target in moves.targets:
            numbers += target
    return np.array(numbers, dtype=np.int64)


def _floats(tensor: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().float().contiguous().numpy()
    return array


def _norm(norm: RmsNorm) -> _native.Norm:
    return _native.Norm(_floats(norm.weight), norm.eps)


def _norms(norms: Norms) -> tuple[_native.Norm | None, _native.After]:
    before = None if norms.before is None else _norm(norms.before)
    match norms.after:
        case None:
            return before, _native.After()
        case RmsNorm() as norm:
            return before, _native.After(_norm(norm))
        case Scale() as scale:
            return before, _native.After(None, scale.factor)
        case _:
            raise AssertionError("what follows is a norm or a factor")


_AnyMixer = GqaMixer | MlaMixer | ShortConvMixer | GatedDeltaMixer | Mamba2Mixer


def _mixer(mixer: _AnyMixer, rope: int) -> Any:
    match mixer:
        case GqaMixer():
            return _gqa(mixer, rope)
        case MlaMixer():
            return _mla(mixer, rope)
        case ShortConvMixer(weights=w):
            return _native.ShortConv(
                inputs=packed(w.inputs),
                output=packed(w.output),
                taps=_floats(w.taps),
                bias=None if w.bias is None else _floats(w.bias),
            )
        case GatedDeltaMixer(config=c, weights=w):
            return _native.GatedDelta(
                inputs=packed(w.inputs),
                output=packed(w.output),
                taps=_floats(w.taps),
                step_bias=_floats(w.step_bias),
                rates=_floats(w.rates),
                norm=_norm(w.norm),
                sizes=(
                    c.linear_num_key_heads,
                    c.linear_num_value_heads,
                    c.linear_key_head_dim,
                    c.linear_value_head_dim,
                ),
            )
        case Mamba2Mixer(config=c, weights=w):
            return _native.Mamba2(
                inputs=packed(w.inputs),
                output=packed(w.output),
                taps=_floats(w.taps),
                conv_bias=None if w.conv_bias is None else _floats(w.conv_bias),
                of_heads=(_floats(w.step_bias), _floats(w.rates), _floats(w.skip)),
                norm=_norm(w.norm),
                sizes=(c.num_heads, c.head_dim, c.n_groups, c.state_size),
                limits=c.time_step_limit,
            )
        case _:
            assert_never(mixer)


def _gqa(mixer: GqaMixer, rope: int) -> _native.GroupedQuery:
    config, weights, norm = mixer.config, mixer.weights, mixer.weights.qk_norm
    of_projections = None
    if isinstance(norm, ProjectionNorm):
        of_projections = (_norm(norm.q), _norm(norm.k))
    return _native.GroupedQuery(
        qkv=packed(weights.qkv),
        output=packed(weights.output),
        heads=(config.num_heads, config.num_kv_heads, config.head_dim),
        rope=rope,
        rotary_dim=config.rotary_dim,
        is_gated=config.is_gated,
        rule=_rule(config),
        head_norm=_norm(norm) if isinstance(norm, RmsNorm) else None,
        projection_norm=of_projections,
        sinks=None if weights.sinks is None else _floats(weights.sinks),
    )


def _rule(config: AttentionConfig) -> _native.AttentionRule:
    return _native.AttentionRule(
        config.scale, config.sliding_window or 0, config.attn_logit_softcapping or 0.0
    )


def _mla(mixer: MlaMixer, rope: int) -> _native.Latent:
    config, weights = mixer.config, mixer.weights
    nope, up = config.qk_nope_head_dim, weights.up
    query = weights.query
    return _native.Latent(
        down=packed(weights.down),
        query=None if query is None else (_norm(query.norm), packed(query.up)),
        norm=_norm(weights.norm),
        to_latent=[pack(of_head[:nope].t(), FORMATS[up.dtype]) for of_head in up],
        from_latent=[pack(of_head[nope:], FORMATS[up.dtype]) for of_head in up],
        output=packed(weights.output),
        sizes=(nope, config.qk_rope_head_dim, config.kv_lora_rank, config.v_head_dim),
        rope=rope,
        rule=_native.AttentionRule(config.scale),
    )


def _mlp(mlp: GatedMlp, gate: GateConfig) -> _native.GatedMlp:
    return _native.GatedMlp(
        packed(mlp.gate_up), packed(mlp.down), gate.kind.value, gate.alpha, gate.swiglu_limit
    )


def _ffn(
    ffn: GatedMlp | MixtureOfExperts, config: MlpConfig | MoeConfig
) -> _native.GatedMlp | _native.Experts:
    if isinstance(ffn, GatedMlp):
        assert isinstance(config, MlpConfig), "a layer is what its configuration says"
        return _mlp(ffn, config.gate)
    assert isinstance(config, MoeConfig), "a layer is what its configuration says"
    routing, router, shared = config.routing, ffn.router, None
    experts = cast(SerialExperts, ffn.experts)
    if ffn.shared is not None:
        assert config.shared_expert is not None
        shared = _mlp(cast(GatedMlp, ffn.shared), config.shared_expert.gate)
    gate: Linear = router.gate
    return _native.Experts(
        router=packed(gate),
        experts=[_mlp(cast(GatedMlp, each), config.expert.gate) for each in experts.each],
        shared=shared,
        num_experts_per_tok=config.num_experts_per_tok,
        sigmoid_and_norm=(routing.scoring_func is ScoringFunc.SIGMOID, config.norm_topk_prob),
        groups=(routing.n_group, routing.topk_group),
        routed_scaling_factor=routing.routed_scaling_factor,
        e_score_correction_bias=None if router.correction is None else _floats(router.correction),
    )
