"""A rank beside rank 0: a process that computes its part of every forward, and keeps no books.

It does what rank 0 says, in order, and ends as soon as rank 0 is gone.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from cache.pool.page_table import PageTable, apply_writes
from cache.spec import CacheSpec, LayerKind
from cache.types import PoolName, RowId, TurnId, pages_for
from session_server.attention.base import Span
from session_server.core.batch import Batch, BatchRow, Probe
from session_server.engine_host.exit_codes import EXIT_BUG, EXIT_ORPHANED
from session_server.engine_host.transport import FrameBuffer, frame
from session_server.models.decoder import Decoder
from session_server.models.errors import ModelError
from session_server.models.registry import load_config
from session_server.parallel.group import RankGroup, RankLost
from session_server.parallel.messages import (
    ENCODER,
    MESSAGES,
    Allocate,
    Answer,
    Check,
    Failed,
    Forward,
    Here,
    Join,
    Loaded,
    LoadPart,
    Message,
    Score,
    Write,
    unpacked,
)
from session_server.parallel.shard_reader import load_shard
from session_server.parallel.sharding import Shard
from session_server.runner.capacity import free_bytes
from session_server.runner.inputs import InputBuilder
from session_server.runner.paged_decoder import TORCH_DTYPES, BackendName, PagedDecoder
from session_server.runner.probe import probe_holds

READ_BYTES: Final = 1 << 18


def run_rank(fd: int) -> int:
    """Serve the socket `fd`, whose other end rank 0 has; return the exit code."""
    faulthandler.enable()
    # Like the engine, of which it is a part: only the server decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with socket.socket(fileno=fd) as connection:
        return _Rank(connection).serve()


class _Rank:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._group: RankGroup | None = None
        self._decoders: list[Decoder] = []
        self._specs: list[CacheSpec] = []
        self._tables: dict[PoolName, PageTable] = {}
        self._models: list[PagedDecoder] = []
        self._inputs: InputBuilder | None = None

    def serve(self) -> int:
        threading.Thread(target=self._read, name="rank-reader", daemon=True).start()
        try:
            with torch.inference_mode():
                while True:
                    self._handle(self._messages.get())
        except RankLost:
            return EXIT_ORPHANED  # rank 0 notices too, and says so
        except BaseException:  # noqa: BLE001 - rank 0 sees it by the socket's end
            traceback.print_exc()
            return EXIT_BUG

    def _read(self) -> None:
        """Read messages; end the process with rank 0, also in the middle of a collective."""
        buffer = FrameBuffer()
        try:
            while data := self._socket.recv(READ_BYTES):
                for payload in buffer.feed(data):
                    self._messages.put(MESSAGES.decode(payload))
        except ConnectionError:
            pass  # killed with what this process has sent still unread
        except BaseException:  # noqa: BLE001 - no message can be read any more
            traceback.print_exc()
        finally:
            os._exit(EXIT_ORPHANED)

    def _handle(self, message: Message) -> None:
        match message:
            case Forward():
                self._forward(message)
            case Score():
                self._score(message)
            case Check():
                self._check(message)
            case Join():
                device = torch.device(message.device)
                if device.type == "cuda":
                    device = torch.device("cuda", message.rank)
                shard = Shard(message.rank, message.size)
                self._answer(Here())
                self._group = RankGroup(shard, device, Path(message.store))
            case LoadPart():
                self._answer(self._load(message))
            case Allocate():
                self._allocate(message)

    def _answer(self, answer: Answer) -> None:
        self._socket.sendall(frame(ENCODER.encode(answer)))

    def _load(self, message: LoadPart) -> Answer:
        assert self._group is not None, "a rank joins first"
        torch.set_num_threads(message.num_threads)
        self._models, self._decoders = [], []
        dtype = TORCH_DTYPES[message.dtype]
        try:
            for directory in map(Path, message.directories):
                config = load_config(directory)
                self._decoders.append(load_shard(directory, config, self._group, dtype=dtype))
        except (ModelError, ValueError) as error:
            return Failed(str(error), isinstance(error, ModelError))
        self._specs = [
            each.config.cache_spec(message.page_size, message.dtype, message.kv_dtype)
            for each in self._decoders
        ]
        return Loaded(free_bytes(self._group.device))

    def _allocate(self, message: Allocate) -> None:
        assert self._group is not None
        self._models, self._tables, self._inputs = [], {}, None  # what was measured with is freed
        capacity, spec = message.capacity, self._specs[0]
        max_pages = pages_for(capacity.max_context_len, spec.page_size)
        device = self._group.device
        self._tables = {
            group.pool: PageTable(capacity.num_rows, max_pages, device=device)
            for group in spec.groups
            if group.kind is not LayerKind.RECURRENT
        }
        backend: BackendName = "cpu" if device.type == "cpu" else "torch"
        self._models = [
            PagedDecoder(decoder, of, capacity, tables=self._tables, backend=backend)
            for decoder, of in zip(self._decoders, self._specs, strict=True)
        ]
        self._inputs = InputBuilder(
            self._tables,
            page_size=spec.page_size,
            last_tokens=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def _forward(self, message: Forward) -> None:
        assert self._group is not None
        assert self._inputs is not None, "pools are allocated first"
        self._apply(message.writes)
        rows = tuple(_row(span) for span in message.spans)
        inputs = self._inputs.build(Batch(0, rows, ()))
        self._group.share_(inputs.token_ids)
        # Only rank 0 needs hidden states: it sends those that are to be scored.
        self._models[message.model].forward(inputs, inputs.logits_indices[:0])

    def _score(self, message: Score) -> None:
        assert self._group is not None
        decoder = self._decoders[message.model]
        shape = (message.num_rows, decoder.config.hidden_size)
        hidden = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        self._group.gather(decoder.head(self._group.share_(hidden)))

    def _check(self, message: Check) -> None:
        assert self._group is not None
        self._apply(message.writes)
        tokens = np.frombuffer(message.tokens, np.int32).copy()
        probe = Probe(message.row, message.start, tokens, message.states)
        self._group.agree(probe_holds(probe, self._models[0], self._tables))

    def _apply(self, writes: Iterable[Write]) -> None:
        apply_writes(self._tables, tuple(unpacked(writes)))


def _row(span: Span) -> BatchRow:
    """Return a row that stands where a span does; its token ids come later."""
    return BatchRow(
        turn_id=TurnId(""),
        attempt=0,
        row=RowId(span.row),
        start=span.start,
        num_tokens=span.num_tokens,
        tokens=np.zeros(span.num_tokens, np.int32),
        sample=False,
        sampling=None,
        states=span.states,
    )
