"""`Ranks`: the other ranks as rank 0 sees them, which starts them, leads them and misses them."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cache.types import TableWrite
from session_server.core.batch import Probe
from session_server.core.child_process import PROGRAM, start_child
from session_server.engine_host.transport import FrameBuffer, frame
from session_server.models.errors import ModelError
from session_server.models.layers.linear import Linear
from session_server.parallel.group import RankGroup, RankLost
from session_server.parallel.messages import (
    ANSWERS,
    ENCODER,
    Answer,
    Check,
    Failed,
    Forward,
    Join,
    Loaded,
    Message,
    Score,
    Write,
    packed,
)
from session_server.parallel.sharding import Shard
from session_server.runner.inputs import ForwardInputs

READ_BYTES: Final = 1 << 12

START_TIMEOUT_S: Final = 60.0
"""Seconds that the process of a rank may take to start, which imports torch."""

EXIT_PATIENCE_S: Final = 5.0
"""Seconds that the ranks may take to end once their sockets are closed, all of them together."""


class Ranks:
    """Lead the ranks 1 to size - 1, each a process; implements `runner.model_runner.OtherRanks`.

    They end with this process, whatever ends it: the system closes their sockets.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Start the processes and meet them. `device`: of rank 0; decides where the others compute.

        Raises:
            RankLost: one of them does not come.
            OSError: a process cannot be started.
        """
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._writes: list[Write] = []
        # The file by which ranks find each other; nobody else may write it.
        self._meeting = TemporaryDirectory(prefix="session-server-ranks-")
        try:
            self.group = self._meet(size, device)
        except BaseException:
            self._end_processes()
            raise
        if device.type == "cpu":
            self._meeting.cleanup()  # NCCL goes on reading the file, gloo does not

    def _meet(self, size: int, device: torch.device) -> RankGroup:
        store = Path(self._meeting.name) / "store"
        for rank in range(1, size):
            ours, process = start_child([*PROGRAM, "_rank"])
            self._sockets.append(ours)
            self._processes.append(process)
            join = Join(rank, size, str(store), device.type)
            ours.sendall(frame(ENCODER.encode(join)))
        for rank, each in enumerate(self._sockets, 1):
            each.settimeout(START_TIMEOUT_S)
            _answer(rank, each)
            each.settimeout(None)
        return RankGroup(Shard(0, size), device, store)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of the ranks, that of rank 1 first."""
        return tuple(process.pid for process in self._processes)

    def send(self, message: Message) -> None:
        """Send a message to every rank.

        Raises:
            RankLost: one of them is gone.
        """
        data = frame(ENCODER.encode(message))
        try:
            for each in self._sockets:
                each.sendall(data)
        except OSError as error:
            raise RankLost(f"a rank is gone: {error}") from error

    def await_loaded(self) -> int:
        """Wait until every rank has loaded its part; return the free bytes of the fullest device.

        Raises:
            ModelError: a rank cannot load its part.
            ValueError: the same, not because of the checkpoint.
            RankLost: one of them is gone.
        """
        answers = [_answer(rank, each) for rank, each in enumerate(self._sockets, 1)]
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, Failed):
                kind = ModelError if answer.is_model else ValueError
                raise kind(f"rank {rank}: {answer.message}")
        return min(answer.free_bytes for answer in answers if isinstance(answer, Loaded))

    def write(self, writes: Sequence[TableWrite]) -> None:
        """Apply table writes before the next forward; implements `OtherRanks.write`."""
        self._writes += packed(writes)

    @contextmanager
    def accompany(self, model: int, inputs: ForwardInputs) -> Iterator[None]:
        """Compute a forward on all ranks; implements `OtherRanks.accompany`.

        Raises:
            RankLost: a rank is gone, or rank 0 has failed where the others went on.
        """
        if not inputs.is_probe:
            self.send(Forward(model, self._take_writes(), inputs.attention.spans))
            self.group.share_(inputs.token_ids)
        with _in_step():
            yield

    def score(self, model: int, head: Linear, hidden: Tensor) -> Tensor:
        """Compute scores on all ranks: [n, hidden] -> [n, rows of the heads of all ranks].

        `head`: rank 0's rows. Raises RankLost.
        """
        self.send(Score(model, len(hidden)))
        hidden = self.group.share_(hidden.contiguous())
        with _in_step():
            return torch.cat(self.group.gather(head(hidden)), dim=1)

    def probe(self, probe: Probe, check: Callable[[], Tensor]) -> Tensor:
        """Probe a page on all ranks; implements `OtherRanks.probe`. Raises RankLost."""
        tokens = probe.tokens.astype(np.int32).tobytes()
        self.send(Check(self._take_writes(), probe.row, probe.start, tokens, probe.states))
        with _in_step():
            return self.group.agree(check())

    def _take_writes(self) -> tuple[Write, ...]:
        writes = tuple(self._writes)
        self._writes.clear()
        return writes

    def watch(self, report: Callable[[BaseException], None]) -> None:
        """Report a rank that ends, also while nothing is computed. `report`: called on a thread of
        its own, at most once for each rank."""
        for rank, connection in enumerate(self._sockets, 1):
            arguments = (rank, connection, report)
            name = f"rank-{rank}-watch"
            threading.Thread(target=_await_end, args=arguments, name=name, daemon=True).start()

    def close(self) -> None:
        """End the ranks, and wait for them: one that does not end is killed."""
        self._end_processes()
        self.group.close()

    def _end_processes(self) -> None:
        for each in self._sockets:
            with suppress(OSError):  # the peer is gone
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, too
            each.close()
        until_s = time.monotonic() + EXIT_PATIENCE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:  # it is stopped, or hangs in a device
                process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(EXIT_PATIENCE_S)
        self._meeting.cleanup()


@dataclass(frozen=True, slots=True)
class SplitHead:
    """Compute the scores of the next token by the rows of an LM head that each rank has.

    `model`: as in `Forward`. `rows`: those of rank 0.
    """

    ranks: Ranks
    model: int
    rows: Linear
    vocab_size: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [n, hidden] -> [n, vocab]; there may be padding behind the vocabulary."""
        return self.ranks.score(self.model, self.rows, hidden)[:, : self.vocab_size]


@contextmanager
def _in_step() -> Iterator[None]:
    """End the engine where rank 0 fails and the other ranks go on."""
    try:
        yield
    except (RuntimeError, MemoryError, IndexError) as error:
        raise RankLost(f"rank 0 failed in a forward: {error}") from error


def _answer(rank: int, connection: socket.socket) -> Answer:
    """Wait for what a rank answers. Raises RankLost."""
    buffer = FrameBuffer()
    try:
        while data := connection.recv(READ_BYTES):
            for payload in buffer.feed(data):
                return ANSWERS.decode(payload)
    except OSError as error:
        raise RankLost(f"rank {rank} does not answer: {error}") from error
    raise RankLost(f"rank {rank} is gone")


def _await_end(
    rank: int, connection: socket.socket, report: Callable[[BaseException], None]
) -> None:
    """Wait for the end of a rank, which has nothing more to say once it has loaded."""
    try:
        data = connection.recv(1)
    except OSError:
        data = b""
    if not data and connection.fileno() >= 0:  # else this process has closed it
        report(RankLost(f"rank {rank} is gone"))
