"""What rank 0 sends to the other ranks, and what they answer: msgpack over inherited sockets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
from msgspec.msgpack import Decoder, Encoder

from cache.spec import Capacity
from cache.types import PoolName, RowId, StateMoves, TableWrite
from session_server.attention.base import Span
from session_server.models.config import DTypeName, KvDTypeName


class Join(msgspec.Struct, frozen=True, tag=True):
    """Answer `Here`, then meet the other ranks.

    `store`: the file by which ranks find each other. `device`: cpu or cuda.
    """

    rank: int
    size: int
    store: str
    device: str


class LoadPart(msgspec.Struct, frozen=True, tag=True):
    """Load a rank's part of the model, and of a draft model; answered by `Loaded` or `Failed`.

    `directories`: the model's, then the draft model's, if there is one. `num_threads`: of a forward
    on a CPU.
    """

    directories: tuple[str, ...]
    dtype: DTypeName
    kv_dtype: KvDTypeName
    page_size: int
    num_threads: int


class Allocate(msgspec.Struct, frozen=True, tag=True):
    """Allocate the rank's KV pools and page tables, in place of those it had."""

    capacity: Capacity


class Write(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Carry a `TableWrite`; `pages` are the bytes of int32."""

    pool: PoolName
    row: RowId
    start: int
    pages: bytes


class Forward(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Compute a forward along: table writes first, then the layers. Not answered.

    Its token ids follow in a collective, because rank 0 may have them on its device alone.

    Attributes:
        model: 0 for the model, 1 for the draft model.
        writes: changes of the page tables since the forward before.
        spans: the rows, in flat order.
    """

    model: int
    writes: tuple[Write, ...]
    spans: tuple[Span, ...]


class Score(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Multiply `num_rows` hidden states, which follow in a collective, by the rank's rows of the LM
    head; the scores go back in another. `model`: as in `Forward`."""

    model: int
    num_rows: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """Probe a page along; the verdicts meet in a collective. See `core.batch.Probe`.

    `writes`: as in `Forward`. `tokens`: bytes of int32.
    """

    writes: tuple[Write, ...]
    row: RowId
    start: int
    tokens: bytes
    states: StateMoves | None


class Here(msgspec.Struct, frozen=True, tag=True):
    """Tell that a rank's process has started, and meets the others now."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Tell that a rank has its part of the weights, and the free bytes of its device."""

    free_bytes: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Tell why a rank cannot load its part; `is_model`: because of the checkpoint."""

    message: str
    is_model: bool


Message = Join | LoadPart | Allocate | Forward | Score | Check
Answer = Here | Loaded | Failed

ENCODER: Final = Encoder()
MESSAGES: Final[Decoder[Message]] = Decoder(Message)
ANSWERS: Final[Decoder[Answer]] = Decoder(Answer)


def packed(writes: Iterable[TableWrite]) -> tuple[Write, ...]:
    """Return table writes as they are sent."""
    return tuple(
        Write(write.pool, write.row, write.start, write.pages.astype(np.int32).tobytes())
        for write in writes
    )


def unpacked(writes: Iterable[Write]) -> tuple[TableWrite, ...]:
    """Return table writes as they were before they were sent."""
    return tuple(
        TableWrite(write.pool, write.row, write.start, np.frombuffer(write.pages, np.int32).copy())
        for write in writes
    )
