"""Run `transformers` with continuous batching in a process of its own, on the same checkpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Self

from session_server.bench.peers import generating_worker
from session_server.bench.peers.system import PeerFailed, ServerSize, TurnTrace
from session_server.core.child_process import PYTHON_MODULE

DTYPES: Final = ("float32", "bfloat16")
"""Rows that it has a type of weights for."""

_READY: Final = "ready"


def is_installed() -> bool:
    """Return whether `transformers` can be imported."""
    return importlib.util.find_spec("transformers") is not None


def version() -> str:
    """Return the name and version of what is installed."""
    return f"transformers {metadata.version('transformers')}"


class GeneratingWorker:
    """Run the worker; a `System` whose conversations have one turn, because it keeps none.

    It answers over pipes, which costs it less than a socket would, and in one piece.
    """

    def __init__(self, checkpoint: Path, dtype: str, size: ServerSize) -> None:
        self.name = f"transformers {dtype}"
        argv = (*PYTHON_MODULE, generating_worker.__name__, str(checkpoint), dtype)
        self._argv = (*argv, str(size.num_threads))
        self._numbers = itertools.count()
        self._waiting: dict[str, Future[tuple[float, int]]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(  # noqa: S603 - our own argv, no shell
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != _READY:
            self.__exit__()
            raise PeerFailed(f"transformers did not start; to see why: {' '.join(self._argv[1:])}")
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        assert self._process is not None, "it was started"
        self._process.kill()
        if self._reader is not None:
            self._reader.join()
        self._process.communicate()  # closes the pipes

    @property
    def pid(self) -> int:
        """Return the process id of the worker."""
        assert self._process is not None, "it was started"
        return self._process.pid

    async def open(self, slot: int) -> GeneratingConversation:
        """Return a conversation for one turn."""
        return GeneratingConversation(self)

    async def generate(self, token_ids: Sequence[int], num_output: int) -> TurnTrace:
        """Generate `num_output` tokens, greedily. The trace has one arrival, that of all."""
        assert self._process is not None, "it was started"
        assert self._process.stdin is not None
        name = str(next(self._numbers))
        done = self._waiting[name] = Future[tuple[float, int]]()
        request = {"name": name, "prompt": list(token_ids), "num_output": num_output}
        begun_s = time.perf_counter()
        self._process.stdin.write(f"{json.dumps(request)}\n")
        trace = TurnTrace(begun_s, (await asyncio.wrap_future(done),))
        if trace.num_tokens != num_output:
            raise PeerFailed(f"wanted {num_output} tokens, transformers made {trace.num_tokens}")
        return trace

    def _read_answers(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            now_s, answer = time.perf_counter(), json.loads(line)
            done = self._waiting.pop(answer["name"])
            if answer["error"] is None:
                done.set_result((now_s, answer["num_tokens"]))
            else:
                done.set_exception(PeerFailed(f"transformers: {answer['error']}"))
        for done in self._waiting.values():
            done.set_exception(PeerFailed("transformers stopped"))


class GeneratingConversation:
    """Run one request; a `PeerConversation`."""

    def __init__(self, worker: GeneratingWorker) -> None:
        self._worker = worker

    async def prefill(self, token_ids: Sequence[int]) -> None:
        """Refuse: nothing is kept between requests."""
        raise AssertionError(f"no cell has a history here, this one {len(token_ids)} tokens")

    async def turn(self, token_ids: Sequence[int], num_output: int) -> TurnTrace:
        """Generate from `token_ids` alone."""
        return await self._worker.generate(token_ids, num_output)

    async def close(self) -> None:
        """Do nothing: nothing is kept."""
