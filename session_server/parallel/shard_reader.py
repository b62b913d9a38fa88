"""Read a rank's part of every tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from session_server.models.config import ModelConfig
from session_server.models.decoder import Decoder
from session_server.models.errors import CheckpointError
from session_server.models.layers.block_weight import Weight
from session_server.models.layers.linear import Linear
from session_server.parallel.group import RankGroup
from session_server.parallel.sharding import Shard, fused_parts, is_summed_bias, shard_config
from session_server.parallel.sums import with_sums
from session_server.runner.checkpoint import Progress, Shape, WeightSource
from session_server.runner.host_memory import return_freed_memory
from session_server.runner.weight_rows import as_dense
from session_server.runner.weights import (
    EMBEDDING,
    HEAD,
    build_decoder,
    expected_tensors,
    open_checkpoint,
)


class ShardedTensors(WeightSource):
    """Supply a rank's part of the tensors of a whole model.

    A tensor is asked for by the shape of the part. It is cut where that differs from the whole, one
    tensor at a time, so a rank never holds more than its parts and one whole tensor.
    """

    def __init__(
        self,
        tensors: WeightSource,
        config: ModelConfig,
        shapes: Mapping[str, Shape],
        shard: Shard,
    ) -> None:
        """`tensors`, `config`, `shapes`: of the whole model."""
        self.dtype = tensors.dtype
        self._tensors = tensors
        self._config = config
        self._part = shard_config(config, shard.size)
        self._shapes = shapes
        self._shard = shard

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return the linear of a part."""
        return self._tensors.linear(weight, bias)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return self._tensors.has(name)

    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Return the rank's part, of this shape; of the embedding its rows.

        Raises:
            CheckpointError: the tensor cannot be cut there, as where codes share a scale.
        """
        whole = self._tensors.take_as(dtype, name, *self._shapes[name])
        if name == EMBEDDING:
            return self._vocabulary_rows(whole)
        if whole.shape != shape:
            return self._cut(name, whole, shape)
        is_layer = name.startswith("model.layers.")
        if is_layer and self._shard.rank > 0 and is_summed_bias(self._config, self._part, name):
            whole.zero_()
        return whole

    def take_linear(self, name: str, outputs: int, inputs: int) -> Weight:
        """Return a matrix; a part of one with codes comes as numbers, which torch computes with."""
        if name in (HEAD, EMBEDDING):
            return self._vocabulary_rows(as_dense(self._tensors.take_linear(name, outputs, inputs)))
        if self._shapes[name] == (outputs, inputs):
            return self._tensors.take_linear(name, outputs, inputs)
        return self.take(name, outputs, inputs)

    def has_codes(self, name: str) -> bool:
        """Return whether a matrix that is not cut is stored as codes."""
        return self._tensors.has_codes(name)

    def _vocabulary_rows(self, weight: Tensor) -> Tensor:
        """Return the rank's rows of [vocab, hidden]: equally many for each, zeros behind the last.

        A copy, so that the whole is freed.
        """
        num_rows = -(-len(weight) // self._shard.size)
        first = self._shard.rank * num_rows
        rows = weight[first : first + num_rows]
        return torch.cat((rows, rows.new_zeros(num_rows - len(rows), weight.shape[1])))

    def _cut(self, name: str, whole: Tensor, shape: Shape) -> Tensor:
        sizes = zip(whole.shape, shape, strict=True)
        axis, *others = (axis for axis, (full, part) in enumerate(sizes) if full != part)
        assert not others, f"{name} is cut in one dimension"
        full, part, shard = whole.shape[axis], shape[axis], self._shard
        num_copies, remainder = divmod(shard.size * part, full)
        if remainder or not num_copies:
            raise CheckpointError(
                f"--tensor-parallel-size {shard.size}: {name} cannot be split in {shard.size}"
            )
        proportions = fused_parts(self._config, name)
        unit, index = full // sum(proportions), shard.rank // num_copies
        pieces, first = [], 0
        for proportion in proportions:
            length = proportion * unit * part // full
            pieces.append(whole.narrow(axis, first + index * length, length))
            first += proportion * unit
        return torch.cat(pieces, dim=axis)  # a copy: the whole is freed


def load_shard(
    directory: Path,
    config: ModelConfig,
    group: RankGroup,
    *,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Decoder:
    """Load a rank's part of a checkpoint as a decoder that sums its outputs with the other ranks.

    `config`: of the whole model.

    Raises:
        CheckpointError: files or tensors are missing, unexpected, unreadable or cannot be cut.
        ValueError: heads or feed-forwards do not divide.
    """
    shard = group.shard
    part = shard_config(config, shard.size)
    checkpoint = open_checkpoint(directory, config)
    shapes = expected_tensors(config, checkpoint.tensors)
    reader = checkpoint.reader(device=group.device, dtype=dtype)
    with return_freed_memory(), reader:
        if progress is not None:
            reader.report_to(progress, len(shapes))
        decoder = build_decoder(part, ShardedTensors(reader, config, shapes, shard))
    return with_sums(decoder, config, group)
