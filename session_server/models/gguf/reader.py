"""Read the header of a GGUF file: metadata, and where each tensor lies.

The format is that of ggml's `docs/gguf.md`, versions 2 and 3, little-endian: magic, version,
counts, key-value pairs, tensor descriptions, then the tensors, each at a multiple of the alignment.
The file is not trusted: all lengths have bounds, and a tensor lies inside the file or nothing is
read. The `gguf` package reads the same, in 17 seconds where this takes 0.3, and has no bounds
(docs/decisions/0030).
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from session_server.models.errors import CheckpointError, UnsupportedModel, shortened
from session_server.models.files import opened
from session_server.models.gguf.types import TENSOR_TYPES, UNSUPPORTED_TYPES, TensorType

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
"""Bytes; tensors begin at multiples of it."""

MAX_ALIGNMENT: Final = 1 << 20

MAX_HEADER_BYTES: Final = 256 << 20
"""Limit of everything before the tensors, in the file and again in memory: 12 MB and 25 MB for
152,000 tokens and their merges, most of it what each text takes beside its characters."""

MAX_ARRAY_LEN: Final = 1 << 23
MAX_STRING_BYTES: Final = 16 << 20
MAX_PAIRS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 17
MAX_DIMENSIONS: Final = 4

_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Code of `struct` for each scalar type of metadata."""

_PLACE_BYTES: Final = 8
"""What a list takes for each of its elements."""

_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Say where a tensor lies. `shape`: outermost first, as torch has it. `start`: in the file."""

    type: TensorType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Hold the header of a file. `num_header_bytes`: of all that comes before the tensors.

    `metadata`: arrays of numbers are `array.array`, those of texts and of booleans lists.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    num_header_bytes: int
    num_bytes: int

    def word(self, key: str, default: str = "None") -> str:
        """Return a text of the metadata; anything else, such as a long list, is no text."""
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else "None"


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file, by its first bytes."""
    try:
        with opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except CheckpointError:
        return False


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file.

    Raises:
        CheckpointError: it is no GGUF file, is damaged or truncated, or part of a split one.
        UnsupportedModel: a version, a byte order or a type of tensor that is not read.
    """
    with opened(path) as file:
        return _Header(path, file).read()


def read_range(path: Path, start: int, num_bytes: int) -> bytearray:
    """Return bytes of a file.

    Raises:
        CheckpointError: it has fewer, or cannot be read.
    """
    content = bytearray(num_bytes)
    with opened(path) as file:
        file.seek(start)
        # A raw file may return less than was asked for, as Linux does above 2 GiB.
        view, num_read = memoryview(content), 0
        while num_read < num_bytes and (count := file.readinto(view[num_read:])):  # type: ignore[attr-defined]
            num_read += count
    if num_read < num_bytes:
        raise CheckpointError(f"{path} became shorter while it was read")
    return content


class _Header:
    """Parse a header, from its first byte on."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._num_read = 0
        self._num_held = 0
        self._num_bytes = os.fstat(file.fileno()).st_size

    def read(self) -> GgufFile:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file")
        version = self._scalar("I")
        if version & 0xFFFF == 0:
            raise UnsupportedModel(f"{self._path} has the bytes of a big-endian machine")
        if version not in VERSIONS:
            raise UnsupportedModel(
                f"{self._path} has GGUF version {version}; known: {', '.join(map(str, VERSIONS))}"
            )
        num_tensors = self._count(MAX_TENSORS, "tensors")
        num_pairs = self._count(MAX_PAIRS, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"it has the metadata key {shortened(key)!r} twice")
            metadata[key] = self._value(self._scalar("I"))
        num_splits = metadata.get("split.count", 1)
        if type(num_splits) is not int:
            raise self._damaged("split.count is no number")
        if num_splits not in (0, 1):
            raise CheckpointError(
                f"{self._path} is one of {num_splits} parts of a model; join them "
                "with llama-gguf-split --merge"
            )
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged("its alignment is no power of two")
        if alignment > MAX_ALIGNMENT:
            raise self._damaged(f"its alignment is {alignment:,}, more than {MAX_ALIGNMENT:,}")
        start = -(-self._num_read // alignment) * alignment
        tensors = {name: self._placed(name, tensor, start) for name, tensor in described}
        if len(tensors) != num_tensors:
            raise self._damaged("it has two tensors of one name")
        return GgufFile(self._path, metadata, tensors, start, self._num_bytes)

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {shortened(name)!r} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        number, start = self._scalar("I"), self._scalar("Q")
        kind = TENSOR_TYPES.get(number)
        if kind is None:
            known = ", ".join(known.name for known in TENSOR_TYPES.values())
            raise UnsupportedModel(
                f"{self._path}: tensor {shortened(name)} has the type "
                f"{UNSUPPORTED_TYPES.get(number, number)}, which is not implemented; known: {known}"
            )
        if shape[-1] % kind.block or 0 in shape:
            raise self._damaged(
                f"tensor {shortened(name)} of shape {list(shape)} has no whole blocks"
            )
        num_elements = 1
        for size in shape:
            num_elements *= size
        return name, GgufTensor(kind, shape, start, num_elements // kind.block * kind.block_bytes)

    def _placed(self, name: str, tensor: GgufTensor, data_start: int) -> GgufTensor:
        """Return a tensor with its place in the file; so far it is relative to the first one."""
        start = data_start + tensor.start
        end = start + tensor.num_bytes
        if end > self._num_bytes:
            raise CheckpointError(
                f"{self._path} is truncated: tensor {shortened(name)} ends at byte {end:,} and the "
                f"file at {self._num_bytes:,}; download it again"
            )
        return GgufTensor(tensor.type, tensor.shape, start, tensor.num_bytes)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._damaged(f"metadata of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any] | array[Any]:
        kind, length = self._scalar("I"), self._count(MAX_ARRAY_LEN, "elements in an array")
        if kind == _STRING:
            self._check_left(8 * length)
            self._hold(_PLACE_BYTES * length)
            return [self._string() for _ in range(length)]
        if kind not in _SCALARS:
            raise self._damaged(f"an array of the unknown type {kind}")
        code = _SCALARS[kind]
        num_bytes = length * _SIZES[code]
        self._check_left(num_bytes)
        if code == "?":
            self._hold(_PLACE_BYTES * length)
            return [byte != 0 for byte in self._bytes(num_bytes)]
        self._hold(num_bytes)
        numbers: array[Any] = array(code)
        numbers.frombytes(self._bytes(num_bytes))
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def _string(self) -> str:
        length = self._scalar("Q")
        if length > MAX_STRING_BYTES:
            raise self._damaged(f"a string of {length:,} bytes")
        try:
            text = self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._damaged("a string is not UTF-8") from None
        self._hold(sys.getsizeof(text))
        return text

    def _count(self, limit: int, what: str) -> int:
        count: int = self._scalar("Q")
        if count > limit:
            raise self._damaged(f"it has {count:,} {what}, more than {limit:,}")
        return count

    def _scalar(self, code: str) -> Any:
        return _UNPACK[code](self._bytes(_SIZES[code]))[0]

    def _bytes(self, count: int) -> bytes:
        self._check_left(count)
        content = self._file.read(count)
        self._num_read += count
        if len(content) < count:
            raise self._truncated()
        return content

    def _check_left(self, count: int) -> None:
        if count > self._num_bytes - self._num_read:
            raise self._truncated()
        if self._num_read + count > MAX_HEADER_BYTES:
            raise self._damaged(f"its header is longer than {MAX_HEADER_BYTES:,} bytes")

    def _hold(self, num_bytes: int) -> None:
        """Count memory that is kept, which for short texts is several times what they are read
        from."""
        self._num_held += num_bytes
        if self._num_held > MAX_HEADER_BYTES:
            raise self._damaged(f"its header takes more than {MAX_HEADER_BYTES:,} bytes of memory")

    def _truncated(self) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is truncated: it ends within its header; download it again"
        )

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is damaged: {what}; download it again")


_UNPACK: Final[Mapping[str, Callable[[bytes], tuple[Any, ...]]]] = {
    code: struct.Struct(f"<{code}").unpack for code in _SCALARS.values()
}
_SIZES: Final = {code: struct.calcsize(f"<{code}") for code in _SCALARS.values()}
