from collections.abc import Sequence
from typing import Any

from torch import Tensor

Array = Any  # numpy arrays or torch tensors on the CPU, contiguous

def cpu() -> str: ...
def cpus() -> list[str]: ...
def use_cpu(name: str) -> None: ...
def set_num_threads(num_threads: int) -> None: ...
def num_threads() -> int: ...
def argmax(logits: Array, tokens: Array, is_finite: Array) -> None: ...

class Linear:
    def __init__(self, weight: Array, format: str, bias: Array | None = None) -> None: ...
    @staticmethod
    def of_codes(
        codes: Array,
        num_bits: int,
        scales: Array,
        minimums: Array | None = None,
        bias: Array | None = None,
    ) -> Linear: ...
    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def apply(self, x: Array, y: Array) -> None: ...

class Norm:
    def __init__(self, weight: Array, eps: float) -> None: ...

class After:
    def __init__(self, norm: Norm | None = None, factor: float = 1.0) -> None: ...

class AttentionRule:
    def __init__(self, scale: float, window: int = 0, softcap: float = 0.0) -> None: ...

class GroupedQuery:
    def __init__(
        self,
        *,
        qkv: Linear,
        output: Linear,
        heads: tuple[int, int, int],
        rope: int,
        rotary_dim: int,
        is_gated: bool,
        rule: AttentionRule,
        head_norm: Norm | None = None,
        projection_norm: tuple[Norm, Norm] | None = None,
        sinks: Array | None = None,
    ) -> None: ...

class Latent:
    def __init__(
        self,
        *,
        down: Linear,
        query: tuple[Norm, Linear] | None,
        norm: Norm,
        to_latent: Sequence[Linear],
        from_latent: Sequence[Linear],
        output: Linear,
        sizes: tuple[int, int, int, int],
        rope: int,
        rule: AttentionRule,
    ) -> None: ...

class ShortConv:
    def __init__(
        self, *, inputs: Linear, output: Linear, taps: Array, bias: Array | None
    ) -> None: ...

class GatedDelta:
    def __init__(
        self,
        *,
        inputs: Linear,
        output: Linear,
        taps: Array,
        step_bias: Array,
        rates: Array,
        norm: Norm,
        sizes: tuple[int, int, int, int],
    ) -> None: ...

class Mamba2:
    def __init__(
        self,
        *,
        inputs: Linear,
        output: Linear,
        taps: Array,
        conv_bias: Array | None,
        of_heads: tuple[Array, Array, Array],
        norm: Norm,
        sizes: tuple[int, int, int, int],
        limits: tuple[float, float],
    ) -> None: ...

class GatedMlp:
    def __init__(
        self, gate_up: Linear, down: Linear, gate: str, alpha: float, limit: float
    ) -> None: ...

class Experts:
    def __init__(
        self,
        *,
        router: Linear,
        experts: Sequence[GatedMlp],
        shared: GatedMlp | None,
        num_experts_per_tok: int,
        sigmoid_and_norm: tuple[bool, bool],
        groups: tuple[int, int],
        routed_scaling_factor: float,
        e_score_correction_bias: Array | None,
    ) -> None: ...

class Decoder:
    def __init__(
        self,
        embedding: Tensor,
        scale: float,
        norm: Norm,
        ropes: Sequence[tuple[Array, float]],
    ) -> None: ...
    def add_pool(self, storage: Tensor, is_latent: bool, value_dim: int, table: Array) -> None: ...
    def add_states(self, parts: Sequence[Array]) -> None: ...
    def add_layer(
        self,
        mixer_norms: tuple[Norm | None, After],
        mixer: GroupedQuery | Latent | ShortConv | GatedDelta | Mamba2,
        ffn_norms: tuple[Norm | None, After],
        ffn: GatedMlp | Experts,
        pool: tuple[int, int],
    ) -> None: ...
    def reserve(self, num_tokens: int) -> int: ...
    def forward(
        self,
        token_ids: Array,
        positions: Array,
        slots: Array,
        rows: Array,
        states: Array,
        wanted: Array,
        hidden: Array,
    ) -> None: ...
