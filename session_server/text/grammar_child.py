"""Compile clients' grammars to find out whether they can be, in a process of its own.

A compiler of other people's grammars recurses as deep as they nest and may take what it wants. Here
it takes no server with it.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from session_server.core.grammar import GrammarCompiler
from session_server.core.sampling import Grammar
from session_server.text.worker_child import Job, serve_jobs

SUBJECT: Final = "the grammar"

_NICENESS: Final = 10


class GrammarSource(msgspec.Struct, frozen=True, array_like=True):
    """Hold what grammars are compiled for: a `tokenizer.json` and the tokens that end answers."""

    tokenizer_json: str
    eos_token_ids: tuple[int, ...]


def serve_grammars(fd: int) -> int:
    """Compile for the socket `fd` until the other end closes it. Returns the exit status."""
    os.nice(_NICENESS)  # forwards come first
    return serve_jobs(fd, _prepare, subject=SUBJECT)


def _prepare(source: bytes) -> Job:
    of = msgspec.msgpack.decode(source, type=GrammarSource)
    compiler = GrammarCompiler(of.tokenizer_json, eos_token_ids=of.eos_token_ids)

    def check(message: bytes) -> list[str]:
        compiler.compile(msgspec.msgpack.decode(message, type=Grammar))
        return []

    return check
