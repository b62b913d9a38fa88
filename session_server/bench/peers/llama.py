"""Run llama.cpp's `llama-server`, with a slot for every conversation, on the same weights.

A client of it sends the whole conversation each time; the server computes what its slot does not
have yet. Slots have separate KV buffers: in a unified one, idle slots slow the others down.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from session_server.bench.peers.system import PeerFailed, ServedSystem, ServerSize, TurnTrace
from session_server.local_server import LocalServer

_HTTP_OK: Final = b"200"
_EVENT: Final = b"data: "
_LINE_BYTES: Final = 16 << 20
"""Of one event: the last one repeats the prompt."""


class LlamaVariant(NamedTuple):
    """Choose the types of weights and KV, and whether attention is llama.cpp's flash attention."""

    weights: str
    kv: str
    flash_attention: str

    @property
    def name(self) -> str:
        """Return what tables call it."""
        return f"llama.cpp {self.weights.lower()}, KV {self.kv}, fa {self.flash_attention}"


VARIANTS: Final[Mapping[str, tuple[LlamaVariant, ...]]] = MappingProxyType(
    {
        "float32": (LlamaVariant("F32", "f32", "off"), LlamaVariant("F32", "f16", "on")),
        "bfloat16": (
            LlamaVariant("BF16", "f16", "off"),
            LlamaVariant("BF16", "f16", "on"),
            LlamaVariant("F16", "f16", "off"),
            LlamaVariant("F16", "f16", "on"),
        ),
        "int8": (LlamaVariant("Q8_0", "f16", "off"), LlamaVariant("Q8_0", "f16", "on")),
    }
)
"""What may be the best of llama.cpp, by our row that it is compared with."""


def version(program: str) -> str:
    """Return the name and version of a `llama-server`, as it says it.

    Raises:
        PeerFailed: it does not run.
    """
    try:
        ran = subprocess.run(  # noqa: S603 - the program that the flag names
            [program, "--version"], check=False, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"--llama-server {program} does not run: {error}") from error
    said = re.search(r"^version: (\S+)", ran.stdout + ran.stderr, re.MULTILINE)
    return f"llama.cpp {said[1]}" if said else "llama.cpp"


class LlamaServer(ServedSystem):
    """Run `llama-server`; a `System`."""

    def __init__(self, program: str, model: Path, variant: LlamaVariant, size: ServerSize) -> None:
        threads = str(size.num_threads)
        server = LocalServer(
            [
                *("--model", str(model), "--host", "127.0.0.1", "--offline"),
                *("--cache-type-k", variant.kv, "--cache-type-v", variant.kv),
                *("--flash-attn", variant.flash_attention),
                *("--parallel", str(size.num_sessions), "--no-kv-unified"),
                *("--ctx-size", str(size.num_sessions * size.context_len)),
                *("--threads", threads, "--threads-batch", threads),
                # A slot's old conversation is never asked for again, so it is not saved.
                *("--cache-ram", "0", "--cache-reuse", "256"),
            ],
            program=(program,),
        )
        super().__init__(variant.name, server)

    async def open(self, slot: int) -> LlamaConversation:
        """Start a conversation in a slot, whose older conversation ends."""
        return LlamaConversation(self.url, slot)


class LlamaConversation:
    """Hold one conversation in a slot; a `PeerConversation`."""

    def __init__(self, url: str, slot: int) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port
        self._slot = slot
        self._history: list[int] = []

    async def prefill(self, token_ids: Sequence[int]) -> None:
        """Compute tokens into the slot without an answer."""
        self._history += token_ids
        await self._complete(0)

    async def turn(self, token_ids: Sequence[int], num_output: int) -> TurnTrace:
        """Add new tokens and generate `num_output`, greedily."""
        self._history += token_ids
        begun_s, events = await self._complete(num_output)
        answers = [(at, json.loads(line)["tokens"]) for at, line in events]
        for _, tokens in answers:
            self._history += tokens
        arrivals = tuple((at, len(tokens)) for at, tokens in answers if tokens)
        trace = TurnTrace(begun_s, arrivals)
        if trace.num_tokens != num_output:
            raise PeerFailed(f"wanted {num_output} tokens, llama-server sent {trace.num_tokens}")
        return trace

    async def close(self) -> None:
        """Do nothing: the slot is taken over by the next conversation in it."""

    async def _complete(self, num_output: int) -> tuple[float, list[tuple[float, bytes]]]:
        """Return when the request was sent, and its events with the time of each."""
        body = json.dumps(
            {
                "prompt": self._history,
                "n_predict": num_output,
                "id_slot": self._slot,
                "cache_prompt": True,
                "ignore_eos": True,
                "samplers": ["top_k"],
                "top_k": 1,
                "seed": 0,
                "stream": True,
            }
        ).encode()
        begun_s = time.perf_counter()
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=_LINE_BYTES)
        head = f"POST /completion HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write((head + length).encode() + body)
        events = []
        status = await reader.readline()
        if status.split()[1:2] != [_HTTP_OK]:
            raise PeerFailed(f"llama-server: {(await reader.read())[-400:]!r}")
        while line := await reader.readline():
            if line.startswith(_EVENT):
                events.append((time.perf_counter(), line[len(_EVENT) :]))
        writer.close()
        return begun_s, events
