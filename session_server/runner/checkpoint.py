"""Read the safetensors files of a checkpoint, tensor by tensor.

Names, shapes and sizes are known from the headers, so a checkpoint is checked before memory is
allocated. One file is mapped at a time, and tensors are copied out of the mapping, which is renewed
after `MAX_MAPPED_BYTES`: loading needs the memory of the weights and of one shard at most. Weights
are not used from the mapping, because the system may drop its pages under memory pressure, and a
step that reads them back from disk takes 20 times as long.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from session_server.models.config import MoeConfig
from session_server.models.errors import CheckpointError
from session_server.models.files import MAX_JSON_BYTES, find_file, find_files, read_object
from session_server.models.layers.block_weight import Fp8Weight, Weight
from session_server.models.layers.linear import Linear, make_linear
from session_server.models.layers.moe import Experts
from session_server.models.quantization import QuantizationConfig
from session_server.runner import fp8
from session_server.runner.layer_factories import (
    BY_TORCH,
    ExpertMatrices,
    LayerFactories,
    serial_experts,
)
from session_server.runner.packed_formats import PackedFormat, packed_format

Progress = Callable[[int, int], None]
"""Called with (tensors read, tensors in all)."""

Shape = tuple[int, ...]

MAX_MAPPED_BYTES: Final = 1 << 26
"""Bytes read from a mapping before it is replaced by a new one."""

INDEX: Final = "model.safetensors.index.json"

MAX_NAMED_TENSORS: Final = 8
"""Tensors that an error names; it counts the rest."""


class WeightSource(ABC):
    """Supply the weights of a decoder. `dtype`: that of the model.

    Building a decoder from `ExpectedTensors` first shows which tensors a checkpoint must have.
    """

    dtype: torch.dtype

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return the linear of a weight [outputs, inputs] that was taken, and a bias [outputs]."""
        return make_linear(weight, bias)

    def experts(self, moe: MoeConfig, experts: Iterable[ExpertMatrices]) -> Experts:
        """Return the experts of a layer from the matrices of each."""
        return serial_experts(moe, experts, self.linear)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of that shape, in the model's dtype on its device."""
        return self.take_as(self.dtype, name, *shape)

    @abstractmethod
    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Return a tensor of that shape in a dtype of its own, where the model's is too coarse."""

    def take_linear(self, name: str, outputs: int, inputs: int) -> Weight:
        """Return a matrix [outputs, inputs]: its codes where they are stored, else like `take`."""
        return self.take(name, outputs, inputs)

    def has_codes(self, name: str) -> bool:
        """Return whether `take_linear` returns codes."""
        del name
        return False


class ExpectedTensors(WeightSource):
    """Record the tensors that are asked for, and return tensors without content.

    `num_bytes`: bytes that a decoder needs for the tensors asked for.
    """

    def __init__(self, names: Iterable[str], dtype: torch.dtype = torch.float32) -> None:
        """Create an empty record for a checkpoint that has the tensors `names`."""
        self._names = frozenset(names)
        self.dtype = dtype
        self.shapes: dict[str, Shape] = {}
        self.num_bytes = 0

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return name in self._names

    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Record name and shape, and return a tensor on the meta device."""
        self.shapes[name] = shape
        self.num_bytes += math.prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Describe a tensor in a file. `dtype`: as the header names it."""

    path: Path
    shape: Shape
    dtype: str

    @property
    def is_fp8(self) -> bool:
        """Return whether it holds 8-bit floats, which need scales."""
        return self.dtype == fp8.STORED_DTYPE


class Checkpoint:
    """Hold the headers of all files of a directory. `num_bytes`: bytes of the files."""

    def __init__(self, directory: Path, quantization: QuantizationConfig | None = None) -> None:
        """Read the headers. `quantization`: how matrices are stored, None for floats.

        Raises:
            CheckpointError: a file is missing, is truncated or is not a safetensors file.
        """
        self.directory = directory
        self.packed = packed_format(quantization)
        self.num_bytes = 0
        self.tensors: dict[str, StoredTensor] = {}
        for path in _weight_files(directory):
            self.num_bytes += path.stat().st_size
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118, no mapping
                    header = file.get_slice(name)
                    shape, dtype = tuple(header.get_shape()), str(header.get_dtype())
                    self.tensors[name] = StoredTensor(path, shape, dtype)

    def check(self, expected: Mapping[str, Shape], ignorable: set[str]) -> None:
        """Compare names and shapes before any tensor is used. FP8 tensors need their scales.

        Raises:
            CheckpointError: they differ; the message names the differences.
        """
        ignorable = ignorable | self._empty_biases(expected)
        expected = self._with_parts(expected)
        scales = {
            name + fp8.SCALES_SUFFIX: fp8.scales_shape(shape)
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].is_fp8
        }
        for name in scales:
            self._check_dtype(name, fp8.SCALES_DTYPES)
        expected = {**expected, **scales}
        shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        check_shapes(self.directory, shapes, expected, ignorable)

    def code_bits(self, name: str, shape: Shape) -> int:
        """Return the bits of a matrix's codes, 0 if it is read as numbers. A `CodeBits`.

        Groups and zero points decide that where they are stored; they are read, codes are not.
        """
        if self.packed is None or not self.packed.holds(name, self.tensors):
            return 0
        with self.reader(device=torch.device("cpu"), dtype=torch.float32) as reader:
            return self.packed.code_bits(name, (shape[0], shape[1]), reader.read)

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor is stored in 8-bit floats. An `IsFp8`."""
        return name in self.tensors and self.tensors[name].is_fp8

    def reader(self, *, device: torch.device, dtype: torch.dtype) -> TensorReader:
        """Return a reader of a checked checkpoint."""
        return TensorReader(self, device=device, dtype=dtype)

    def _empty_biases(self, expected: Mapping[str, Shape]) -> set[str]:
        """Return biases of zeros that the model does not have: AutoGPTQ gives all matrices one."""
        if self.packed is None:
            return set()
        weights = (name for name in expected if self.packed.holds(name, self.tensors))
        biases = {name.removesuffix("weight") + "bias" for name in weights}
        extra = (biases & self.tensors.keys()) - expected.keys()
        with self.reader(device=torch.device("cpu"), dtype=torch.float32) as reader:
            return {name for name in extra if not reader.take(name).any()}

    def _with_parts(self, expected: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the tensors that are stored for those expected: quantized matrices have parts."""
        stored: dict[str, Shape] = {}
        for name, shape in expected.items():
            if self.packed is None or not self.packed.holds(name, self.tensors):
                stored[name] = shape
                continue
            if len(shape) == 1:
                raise CheckpointError(
                    f"{self.directory}: {name} is stored quantized, and should be floats"
                )
            parts = self.packed.parts(name, (shape[0], math.prod(shape[1:])), self.tensors)
            for part, of in parts.items():
                stored[part] = of.shape
                self._check_dtype(part, of.dtypes)
        return stored

    def _check_dtype(self, name: str, dtypes: Collection[str]) -> None:
        """Refuse a tensor, if there is one, of another dtype than `dtypes`."""
        if name in self.tensors and self.tensors[name].dtype not in dtypes:
            raise CheckpointError(
                f"{self.directory}: {name} is of dtype {self.tensors[name].dtype} and should be of "
                f"{' or '.join(sorted(dtypes))}"
            )


class CheckpointReader(WeightSource):
    """Copy tensors out of files; a context manager that reports its progress."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        """Create a reader; `take` returns copies of `dtype` on `device`."""
        self.device = device
        self.dtype = dtype
        self.factories: LayerFactories = BY_TORCH
        self._progress: Callable[[int], None] = lambda _: None
        self._num_read = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""

    def linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return what the backend makes of a weight and a bias."""
        return self.factories.linear(weight, bias)

    def experts(self, moe: MoeConfig, experts: Iterable[ExpertMatrices]) -> Experts:
        """Return what the backend makes of the matrices of a layer's experts."""
        return self.factories.experts(moe, experts, self.linear)

    def report_to(self, progress: Progress, num_tensors: int) -> None:
        """Call `progress` after every tensor read."""
        # A matrix may be read twice: as numbers and as codes for the head, or among experts that
        # turn out to be of several kinds.
        self._progress = lambda num_read: progress(min(num_read, num_tensors), num_tensors)

    def count_read(self) -> None:
        """Report one more tensor."""
        self._num_read += 1
        self._progress(self._num_read)


class TensorReader(CheckpointReader):
    """Copy tensors out of safetensors files; holds one file at a time."""

    def __init__(self, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype) -> None:
        """Create a reader of a checked checkpoint; `take` returns copies of `dtype` on `device`."""
        super().__init__(device=device, dtype=dtype)
        self._tensors = checkpoint.tensors
        self._packed = checkpoint.packed
        self._stack = ExitStack()
        self._path: Path | None = None
        self._file: Any = None
        self._num_mapped_bytes = 0

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor of that name."""
        return name in self._tensors

    def take_as(self, dtype: torch.dtype, name: str, *shape: int) -> Tensor:
        """Return a copy of a tensor in the given dtype; quantized ones are dequantized."""
        if self._packed is not None and self._packed.holds(name, self._tensors):
            weight = self._quantized(self._packed, name, (shape[0], shape[1]), dtype)
            return weight if isinstance(weight, Tensor) else weight.dense()
        tensor = self._read(name)
        if self._tensors[name].is_fp8:
            scales = self._read(name + fp8.SCALES_SUFFIX).to(self.device)
            tensor = fp8.dequantize(tensor.to(self.device), scales)
        copied = tensor.to(device=self.device, dtype=dtype, copy=True)
        self.count_read()
        return copied

    def take_linear(self, name: str, outputs: int, inputs: int) -> Weight:
        """Return a matrix, as codes if it is stored as such."""
        if self._packed is not None and self._packed.holds(name, self._tensors):
            return self._quantized(self._packed, name, (outputs, inputs), self.dtype)
        return self._fp8(name) if self._tensors[name].is_fp8 else self.take(name, outputs, inputs)

    def has_codes(self, name: str) -> bool:
        """Return whether a matrix is stored as codes."""
        return self._packed is not None and self._packed.holds(name, self._tensors)

    def read(self, name: str) -> Tensor | None:
        """Return a tensor as it is stored, None if there is none of that name."""
        return self._read(name) if name in self._tensors else None

    def _quantized(
        self, packed: PackedFormat, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Weight:
        weight = packed.codes(name, shape, self.read).weight(dtype)
        self.count_read()
        return weight.to(self.device)

    def _fp8(self, name: str) -> Fp8Weight:
        numbers, scales = self._read(name), self._read(name + fp8.SCALES_SUFFIX)
        codes = numbers.view(torch.uint8).to(self.device, copy=True)
        self.count_read()
        return Fp8Weight(codes, fp8.by_output(scales, len(codes)).to(self.device), self.dtype)

    def _read(self, name: str) -> Tensor:
        path = self._tensors[name].path
        if path != self._path or self._num_mapped_bytes >= MAX_MAPPED_BYTES:
            self._stack.close()
            self._file = self._stack.enter_context(_open(path))
            self._path = path
            self._num_mapped_bytes = 0
        tensor: Tensor = self._file.get_tensor(name)
        self._num_mapped_bytes += tensor.nbytes
        return tensor


def check_shapes(
    path: Path, stored: Mapping[str, Shape], expected: Mapping[str, Shape], ignorable: set[str]
) -> None:
    """Compare the tensors of a checkpoint with those that a model must have.

    Raises:
        CheckpointError: they differ; the message names the differences.
    """
    faults = []
    missing = sorted(expected.keys() - stored.keys())
    if missing:
        faults.append(f"missing tensors: {_list_names(missing)}")
    unexpected = sorted(stored.keys() - expected.keys() - ignorable)
    if unexpected:
        faults.append(f"unexpected tensors: {_list_names(unexpected)}")
    wrong = [
        f"{name} is {list(stored[name])} and should be {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in stored and stored[name] != shape
    ]
    if wrong:
        faults.append(f"wrong shapes: {_list_names(wrong)}")
    if faults:
        raise CheckpointError(f"{path}: {'; '.join(faults)}")


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _weight_files(directory: Path) -> list[Path]:
    """Return the shards that the index names, or every safetensors file if there is no index."""
    index = read_object(directory, INDEX, MAX_JSON_BYTES)
    if index is None:
        files = find_files(directory, "*.safetensors")
        if not files:
            raise CheckpointError(f"{directory} has no *.safetensors file; fetch the weights too")
        return files
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and name.endswith(".safetensors") for name in weight_map.values()
    ):
        raise CheckpointError(f"{directory / INDEX} is not an index of safetensors files")
    paths = {name: find_file(directory, name) for name in sorted(set(weight_map.values()))}
    absent = [name for name, path in paths.items() if path is None]
    if absent:
        raise CheckpointError(f"{directory} lacks files its index names: {_list_names(absent)}")
    return [path for path in paths.values() if path is not None]


def _list_names(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED_TENSORS
    return ", ".join(names[:MAX_NAMED_TENSORS]) + (f" and {rest} more" if rest > 0 else "")
