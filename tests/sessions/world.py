"""A manager on a paper engine and a small tokenizer, and short ways to ask it for things."""

from __future__ import annotations

import asyncio
import tempfile
import zlib
from collections.abc import Coroutine
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from session_server.core.engine_client import EngineClient
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import (
    ChatInput,
    Message,
    SessionEntry,
    TextOptions,
    TokenInput,
    TurnCancelled,
    TurnCompleted,
    TurnEnd,
    TurnFailedEntry,
    TurnInput,
    TurnRequest,
)
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.store.session_store import SessionStore
from session_server.sessions.views import OpenRequest, TurnView
from session_server.text.model_text import ModelText
from tests.sessions.paper_engine import PaperEngine
from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model

T = TypeVar("T")
EngineT = TypeVar("EngineT", bound=EngineClient)
OWNER = Owner("name:owner")


@lru_cache(maxsize=8)
def model_text(kind: str = "chatml") -> ModelText:
    with tempfile.TemporaryDirectory() as folder:
        return load_local_text(write_model(Path(folder) / kind, kind))


def letters(text: ModelText, alphabet: str = "abcd") -> tuple[int, ...]:
    return tuple(text.tokenizer.encode_content(letter)[0] for letter in alphabet)


def named(owner: Owner | str) -> Owner:
    return Owner(owner) if isinstance(owner, str) else owner


class HeldManager(Generic[EngineT]):
    """A session manager over an engine, on one event loop that only runs when asked to."""

    def __init__(
        self,
        engine: EngineT,
        text: ModelText,
        *,
        salts: TenantSalts,
        limits: SessionLimits | None = None,
        quotas: QuotaLimits | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        store: SessionStore | None = None,
    ) -> None:
        self.engine = engine
        self.text = text
        self.now_s = 100.0
        self.loop = loop or asyncio.new_event_loop()
        self.manager = SessionManager(
            engine, text, salts=salts, limits=limits, quotas=quotas, clock=lambda: self.now_s
        )
        if store is not None:
            self.manager.store_in(store)
        self.do(self.manager.start())

    def finish(self) -> None:
        self.do(self.manager.stop())
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one coroutine to its end."""
        return self.loop.run_until_complete(coroutine)

    def spin(self, times: int = 3) -> None:
        """Let callbacks run that are ready."""
        for _ in range(times):
            self.do(asyncio.sleep(0))

    def open(self, *, owner: Owner | str = OWNER, **options: Any) -> str:
        return self.manager.open(named(owner), OpenRequest(**options)).session_id

    def create(self, *, owner: Owner | str = OWNER, **options: Any) -> str:
        """Open a session as a client does."""
        request = OpenRequest(**options)
        return self.do(self.manager.create(named(owner), request)).session_id

    def submit(
        self, session_id: str, request: TurnRequest, *, owner: Owner | str = OWNER
    ) -> TurnView:
        return self.do(self.manager.submit(named(owner), session_id, request))

    def history(self, session_id: str) -> tuple[int, ...]:
        return self.manager.history(OWNER, session_id)

    def entries(self, session_id: str) -> list[SessionEntry]:
        """All that the journal still has."""
        journal = self.manager.journal(OWNER, session_id)
        return [found.entry for found in journal.read(journal.first_seq - 1)]


class World(HeldManager[PaperEngine]):
    """Sessions of a small model over an engine on paper."""

    def __init__(
        self,
        kind: str = "chatml",
        *,
        limits: SessionLimits | None = None,
        quotas: QuotaLimits | None = None,
        max_turn_len: int = 4096,
        share_prefixes: bool = True,
        store: SessionStore | None = None,
        kv_tiers: Literal["none", "host", "disk"] = "none",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        text = model_text(kind)
        alphabet = letters(text)
        ends = tuple(sorted(text.eos_token_ids))

        def next_token(context: list[int]) -> int:
            draw = zlib.crc32(",".join(map(str, context)).encode())
            return ends[draw % 2] if draw % 23 == 0 else alphabet[draw % len(alphabet)]

        self.next_token = next_token
        engine = PaperEngine(
            vocab_size=len(text.tokenizer.vocabulary),
            eos_ids=ends,
            max_turn_len=max_turn_len,
            next_token=next_token,
            kv_tiers=kv_tiers,
        )
        salts = TenantSalts(b"0123456789abcdef", share_prefixes=share_prefixes)
        super().__init__(
            engine, text, salts=salts, limits=limits, quotas=quotas, store=store, loop=loop
        )

    def run(self, session_id: str, request: TurnRequest) -> TurnEnd:
        """Submit a turn and play it to its end."""
        self.submit(session_id, request)
        self.engine.run()
        return self.end_of(session_id, request.turn_id)

    def end_of(self, session_id: str, turn_id: str) -> TurnEnd:
        end = self.manager.turn(OWNER, session_id, turn_id).end
        assert end is not None, "the turn has not ended"
        return end

    def decode(self, token_ids: tuple[int, ...]) -> str:
        return self.text.tokenizer.decode(token_ids, skip_special_tokens=False)

    def control(self, text: str) -> tuple[int, ...]:
        return tuple(self.text.tokenizer.encode_control(text))


def turn(
    turn_id: str,
    content: str | TurnInput | tuple[int, ...] = "Hello",
    *,
    stop: tuple[str, ...] = (),
    keep_stop: bool = False,
    queue: bool = True,
    **sampling: Any,
) -> TurnRequest:
    """A chat turn of one user message, or of any input."""
    turn_input: TurnInput
    if isinstance(content, str):
        turn_input = ChatInput((Message("user", content),))
    elif isinstance(content, tuple):
        turn_input = TokenInput(content)
    else:
        turn_input = content
    sampling.setdefault("max_tokens", 6)
    return TurnRequest(
        turn_id,
        turn_input,
        SamplingParams(**sampling),
        text=TextOptions(stop=stop, keep_stop=keep_stop),
        queue=queue,
    )


def completed(end: TurnEnd) -> TurnCompleted:
    assert isinstance(end, TurnCompleted), end
    return end


def cancelled(end: TurnEnd) -> TurnCancelled:
    assert isinstance(end, TurnCancelled), end
    return end


def failed(end: TurnEnd) -> TurnFailedEntry:
    assert isinstance(end, TurnFailedEntry), end
    return end
