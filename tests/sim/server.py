"""The whole server in memory: the real application over the real sessions, on a virtual loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Final
from unittest.mock import patch

from session_server.config import Settings, model_directory
from session_server.core.owner import Owner
from session_server.core.sampling import SamplingParams
from session_server.core.session_events import TokenUsage, TurnEnd
from session_server.metrics.prometheus import ServerMetrics
from session_server.sessions.journal import JournalLimits
from session_server.sessions.manager import SessionManager
from session_server.sessions.quotas import QuotaLimits, SessionLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.tokenizing import NUM_THREADS
from session_server.text.model_text import ModelText
from session_server.web.app import create_app
from session_server.web.key_file import digest_of
from session_server.web.keys import KeyRing
from session_server.web.readers import Readers
from session_server.web.services import AppServices, ModelCard, WebSettings
from tests.sessions.recount import recount
from tests.sim.config import Habits
from tests.sim.context import SimContext
from tests.sim.draws import mix
from tests.sim.echo import EchoModel
from tests.sim.failure import Broken, Layer
from tests.sim.faults import Site
from tests.sim.hosted_engine import HostedEngine
from tests.sim.loop import VirtualLoop
from tests.sim.network import Application, Socket
from tests.sim.stage import Stage
from tests.text.local_text import load_local_text

LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDE"
TOKENIZE_DEADLINE_S: Final = 5.0
MAX_QUEUED_TURNS: Final = 2
BYTES_PER_ENTRY: Final = 500
"""A little more than most entries take: the journal meets both of its bounds."""

_SECRET: Final = b"a simulated secret"


@functools.cache
def embedded_text() -> ModelText:
    """Tokenizer and template of the embedded model."""
    return load_local_text(model_directory(Settings().model))


def wire_model(num_repeats: int, window: int) -> EchoModel:
    """The fake model over the embedded model's letters and its end of turn."""
    text = embedded_text()
    letters = (text.tokenizer.encode_content(letter)[0] for letter in LETTERS)
    eos = min(text.eos_token_ids)
    return EchoModel((eos, *letters), num_repeats, len(text.tokenizer.vocabulary), window)


def drawn_ids(seed: int) -> Callable[[int], str]:
    """What stands for `secrets.token_hex`: the same ids in every run of a seed."""
    numbers = itertools.count()
    return lambda num_bytes: "".join(
        f"{mix(seed, next(numbers)):016x}" for _ in range(num_bytes // 8)
    )


class SimServer:
    """Application, sessions and engine of one simulation. `loop` runs only when told to."""

    def __init__(self, context: SimContext) -> None:
        config = context.config
        self._context = context
        self.keys = [f"key-{index}" for index in range(config.habits.num_owners)]
        self.model = wire_model(config.sizes.num_repeats, config.sizes.layers.read_window)
        self.limits = _session_limits(config.habits)
        self.salts = TenantSalts(_SECRET, share_prefixes=config.sizes.share_prefixes)
        self.engine = HostedEngine(
            lambda: Stage(context, self.model),
            inbox_size=config.habits.engine_inbox,
            reached=context.reached,
        )
        # After the engine, which may refuse its sizes: a loop has to be closed.
        self.loop = VirtualLoop(self._work_s)
        # Which page of a session is probed depends on its id.
        self._ids = patch("secrets.token_hex", drawn_ids(config.seed))
        self._ids.start()
        self.sessions = SessionManager(
            self.engine,
            embedded_text(),
            salts=self.salts,
            limits=self.limits,
            # What the clients can have open at once, with canceled inputs that threads still
            # hold, and no more: whatever is counted and not given back shows soon.
            quotas=QuotaLimits(
                owner_sessions=config.habits.num_sessions,
                owner_turns=-(-config.habits.num_sessions // config.habits.num_owners)
                * (1 + MAX_QUEUED_TURNS + bool(config.habits.rewrite))
                + NUM_THREADS,
                # Too little for all journals at once.
                replay_bytes=config.habits.num_sessions
                * config.habits.journal_entries
                * BYTES_PER_ENTRY
                // 2,
            ),
            clock=self.loop.time,
        )
        self.loop.run_until_complete(self.sessions.start())
        app = create_app(self._services())
        self.app: Application = app
        self._readers: Readers = app.state.readers
        self.sockets: list[Socket] = []

    @property
    def num_tasks(self) -> int:
        """Tasks that have not ended, those of connections included."""
        return len(asyncio.all_tasks(self.loop))

    @property
    def num_drafts(self) -> int:
        """Drafts that wait for their answers."""
        return len(self.sessions.drafts._newest)

    def connect(self, session_id: str, key: str, query: dict[str, str]) -> Socket:
        """A new connection to a session."""
        socket = Socket(self.loop, capacity=self._context.config.habits.socket_frames)
        self.sockets = [each for each in self.sockets if not each.is_over]
        self.sockets.append(socket)
        socket.open(self.app, session_id, key=key, query=query)
        return socket

    def do(self, action: Callable[[], object]) -> None:
        """Let the loop do this next."""
        self.loop.call_soon(action)

    def run(self, seconds: float = 0.0) -> None:
        """Let time pass, run what is ready, and see that nothing of it crashed."""
        self.loop.advance(seconds)
        self._check_errors()

    def wait(self, seconds: float) -> None:
        """Let time pass, as the application's own tick would notice it."""
        self.run(seconds)
        self.do(self.sessions.tick)
        self.run()

    def check_counts(self) -> None:
        """Every byte that is counted for an owner is there, and every one that is there counts."""
        try:
            recount(self.sessions)
        except AssertionError as error:
            raise Broken(Layer.AUDIT, f"counted and there: {error}") from error

    def check_kv(self, owner: Owner, session_id: str, longest: int) -> None:
        """A session at rest counts the KV that its turns have left, and none that it has lost; it
        has had up to `longest` tokens, more than now where it was rewound."""
        session = self.sessions._sessions.get(owner, session_id)
        if session.live is not None:
            return
        is_held = session.copy.state == "resident"
        least, most = (len(session.transcript), longest) if is_held else (0, 0)
        if not least <= session.copy.counted_tokens <= most:
            counted = f"{session.copy.counted_tokens} tokens, not {least} to {most}"
            raise Broken(Layer.AUDIT, f"{session_id} is counted with {counted}")

    def check_remembered(
        self, owner: Owner, session_id: str, told: TurnEnd, *, is_told: bool
    ) -> None:
        """A turn that has ended is remembered for as long as its session lives; its text, once the
        journal has dropped its end, for as long as the answer stays."""
        end = self.sessions.turn(owner, session_id, told.turn_id).end
        is_short = end is not None and not is_told and not end.outcome.text
        if end is None or short_of(end, is_short=is_short) != short_of(told, is_short=is_short):
            raise Broken(Layer.SHADOW, f"{told.turn_id} ended as {told}, remembered is {end}")

    def check_empty(self) -> None:
        """Nothing is left of all that clients did: sessions, turns, tasks, timers, connections."""
        self.sockets = [socket for socket in self.sockets if not socket.is_over]
        stats = self.sessions.stats()
        drafts = self.sessions.drafts
        left = {
            "sessions": stats.sessions,
            "drafts": len(drafts._newest) + len(drafts._building) + len(drafts._sent),
            "live turns": stats.live_turns,
            "queued turns": stats.queued_turns,
            "owners": len(self.sessions._quotas.owners),
            "connections": len(self.sockets),
            "counted connections": self._readers.num_connections,
            "counted KV": self.sessions._quotas.kv_tokens.total,
            "tasks": self.num_tasks,
        }
        if any(left.values()):
            raise Broken(Layer.AUDIT, f"not given back: {left}")

    def close(self) -> None:
        """End whatever still runs, and the loop."""
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.drain()
        self.loop.run_until_complete(self.sessions.stop())
        self.loop.close()
        self._ids.stop()

    def _check_errors(self) -> None:
        if self.loop.errors:
            raise self.loop.errors[0]

    def _work_s(self) -> float:
        """PromptBuilder aside takes a moment, and now and then longer than is waited for."""
        is_slow = self._context.faults.strikes(Site.TOKENIZER_SLOW)
        self._context.reached["fault tokenizer_slow"] += is_slow
        return 2 * TOKENIZE_DEADLINE_S if is_slow else 0.01

    def _services(self) -> AppServices:
        text = embedded_text()
        return AppServices(
            sessions=self.sessions,
            metrics=ServerMetrics(now_s=self.loop.time),
            model=ModelCard(
                name="echo",
                path="echo",
                vocab_size=len(text.tokenizer.vocabulary),
                max_context=self._context.config.sizes.max_context_len,
                created_s=0,
                token_text=lambda token: text.tokenizer.decode([token]),
                defaults=SamplingParams(),
            ),
            settings=WebSettings(
                keys=KeyRing(
                    # Some of the priorities that clients draw are above this ceiling.
                    {digest_of(k): Owner(digest_of(k), max_priority=3) for k in self.keys}
                ),
                max_queued_turns=MAX_QUEUED_TURNS,
            ),
            now_s=self.loop.time,
        )


def short_of(end: TurnEnd, *, is_short: bool = False) -> tuple[type[TurnEnd], TokenUsage, str]:
    """What an end says for as long as its session lives, and shortly, when its answer is gone."""
    return type(end), end.outcome.usage, "" if is_short else end.outcome.text


def _session_limits(habits: Habits) -> SessionLimits:
    return SessionLimits(
        default_ttl_s=120.0,
        max_queued_turns=MAX_QUEUED_TURNS,
        inline_input_chars=habits.inline_chars,
        tokenize_deadline_s=TOKENIZE_DEADLINE_S,
        journal=JournalLimits(
            max_bytes=habits.journal_entries * BYTES_PER_ENTRY,
            max_entries=habits.journal_entries,
            max_age_s=300.0,
        ),
    )
