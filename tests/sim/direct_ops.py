"""What the direct front is told to do, drawn from the habits of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

from session_server.core.tier_orders import CopyIn
from tests.sim.context import SimContext
from tests.sim.direct import DirectWorld, ServerSession
from tests.sim.draws import mix
from tests.sim.faults import Site
from tests.sim.trace import Op
from tests.sim.typing_ops import Typist

DOCUMENT_LEN: Final = 80
NUM_DOCUMENTS: Final = 3
_LENGTHS: Final = (0, 1, 1, 2, 3, 4, 5, 8, 13, 21, 40)


class DirectOps:
    """Draws the next operation from the habits of the configuration and the state of the world."""

    def __init__(self, context: SimContext, world: DirectWorld) -> None:
        config = context.config
        self._config = config
        self._draws = context.draws
        self._faults = context.faults
        self._world = world
        self._num_names = 0
        self._then: Op | None = None
        """What has to come next."""

        habits = config.habits
        makers = {
            self._submit: habits.submit,
            self._open: habits.open,
            self._cancel: habits.cancel,
            self._stop: habits.stop,
            self._close: habits.close,
            self._misbehave: habits.misbehave,
            self._flush: habits.flush,
            self._report: habits.report,
            self._draft: habits.draft,
            self._cool: habits.cool,
        }
        self._is_tiered = config.sizes.host_kv_bytes > 0
        self._has_tenants = habits.num_owners > 1 and context.draws.happens("tenants", 500)
        self._typist = Typist(context.draws, self._typed_tokens)
        self._makers = list(makers)
        self._weights = list(accumulate(makers.values()))
        self._documents = [
            tuple(1 + mix(config.seed, which, at) % 31 for at in range(DOCUMENT_LEN))
            for which in range(NUM_DOCUMENTS)
        ]

    def next(self) -> Op:
        """The next operation."""
        if (op := self._then) is not None:
            self._then = None
            return op
        if self._world.is_ending:
            return {"op": "restart"} if self._world.has_ended else self._device_op()
        if self._faults.strikes(Site.ENGINE_DEATH):
            is_told = self._draws.happens("is told to end", 700)
            return {"op": "shutdown"} if is_told else {"op": "restart"}
        if self._draws.happens("falls silent", 5 * self._is_tiered):
            return {"op": "rest"}
        if self._draws.happens("patient", self._config.habits.patient):
            return self._device_op()
        return self._draws.weighted("op", self._makers, self._weights)() or self._device_op()

    def _device_op(self) -> Op:
        if self._world.is_resting and (news := self._submit()) is not None:
            return news
        carrier = self._world.stage.carrier
        if carrier is not None and carrier.num_waiting and self._draws.happens("carries", 300):
            return {"op": "carry", "which": self._draws.below("which order", 8)}
        waiting = () if carrier is None else carrier.waiting
        per_mille = 60 if any(isinstance(order, CopyIn) for order in waiting) else 5
        is_due = self._world.stage.engine.due_s is not None
        if is_due and self._draws.happens("nothing comes", per_mille):
            return {"op": "silence"}
        what = self._draws.below("device op", 16)
        if what == 0:
            return {"op": "execute"}
        results = (0, 2, *[1] * 13)[what - 1]
        return {"op": "step", "results": results, **self._world.stage.draw_fault()}

    def _open(self) -> Op | None:
        draws, habits = self._draws, self._config.habits
        if len(self._world.sessions) >= habits.num_sessions:
            return None
        length = draws.pick("history", (0, 0, 0, 7, 16, 33))
        is_pinned = self._config.sizes.pinned_quota_pages > 0 and draws.happens("pinned", 400)
        owner = "abc"[draws.below("owner", habits.num_owners)]
        tokens = draws.pick("document", self._documents)[:length]
        left, others = self._world.left, list(self._world.sessions.values())
        if left and draws.happens("is forgotten", 300):
            return {"op": "forget"}
        if left and draws.happens("comes back", 600):
            back = draws.pick("who comes back", left)
            owner, tokens = back.owner, back.history
        elif others and self._is_tiered and draws.happens("forks", 500):
            other = draws.pick("who is forked", others)
            owner, tokens = other.owner, other.history
        return {
            "op": "open",
            "s": self._name("s"),
            "owner": owner,
            "tenant": owner if self._has_tenants else "",
            "tokens": list(tokens),
            "pinned": is_pinned,
        }

    def _submit(self) -> Op | None:
        session = self._pick(is_live=False)
        if session is None:
            return self._open()
        draws, length = self._draws, len(session.history)
        cut = length
        if draws.happens("rewind", self._config.habits.rewind):
            cut = draws.below("cut", length + 1)
        cut, room = self._start_over(cut)
        new: Sequence[int] = ()
        if session.typed and draws.happens("says what was typed", 750):
            new = self._typist.say(session.typed)
        return {
            "op": "submit",
            "s": session.session_id,
            "t": self._name("t"),
            "cut": cut,
            "new": list(new or self._new_tokens(session.history[:cut], room)),
            "lag": draws.pick("lag", (0, 0, 0, 0, 1, 5)),
            "sampling": self._sampling(cut),
            "priority": draws.pick("priority", (0, 0, 0, 1, 5)),
        }

    def _draft(self) -> Op | None:
        session = self._pick(is_live=False)
        if session is None:
            return self._open()
        draws, cut = self._draws, len(session.history)
        if session.typed and draws.happens("abandons", 80):
            return {"op": "drop", "s": session.session_id}
        if draws.happens("rewind and draft", self._config.habits.rewind):
            cut = draws.below("cut", cut + 1)
        cut, room = self._start_over(cut)
        new = self._typist.type_on(session.typed)
        if not draws.happens("types too much", 30):
            new = new[: max(1, room - 4)]
        lag = draws.pick("lag of a draft", (0, 0, 0, 0, 0, 0, 3))
        name = self._name("d")
        return {
            "op": "draft",
            "s": session.session_id,
            "d": name,
            "cut": cut,
            "new": new,
            "lag": lag,
        }

    def _start_over(self, cut: int) -> tuple[int, int]:
        """Where a turn goes on, and the room that it has: a long history is cut."""
        draws, max_len = self._draws, self._world.stage.engine.max_turn_len
        if max_len - cut < 12 and not draws.happens("overfull", 20):
            cut = min(cut, draws.below("start over", 20))
        return cut, max_len - cut

    def _typed_tokens(self, length: int) -> list[int]:
        return [1 + self._draws.below("typed", 31) for _ in range(length)]

    def _new_tokens(self, history: tuple[int, ...], room: int) -> tuple[int, ...]:
        draws, habits = self._draws, self._config.habits
        if draws.happens("too long", 20):
            return (1,) * max(0, room + draws.below("by", 3))
        start = len(history)
        length = max(0, min(room - 1, habits.max_input, draws.pick("length", _LENGTHS)))
        if draws.happens("shared", habits.shared):
            for document in self._documents:
                if start + length <= len(document) and history == document[:start]:
                    return document[start : start + length]
        return tuple(1 + draws.below("token", 31) for _ in range(length))

    def _sampling(self, prompt_len: int) -> dict[str, Any]:
        draws, habits = self._draws, self._config.habits
        lengths = (0, 1, 2, 5, 9, 17, 30, 40)
        # Sessions that say nothing stay with the text they share, turn after turn.
        is_silent = habits.shared >= 900 and draws.happens("silent", 400)
        max_tokens = 0 if is_silent else min(habits.max_new, draws.pick("max_tokens", lengths))
        wanted = draws.below("scores from", prompt_len + 2)
        return {
            "max_tokens": max_tokens,
            "min_tokens": min(max_tokens, draws.pick("min_tokens", (0, 0, 0, 2, 6))),
            "seed": draws.below("sampling seed", 4),
            "ignore_eos": draws.pick("ignore_eos", (True, True, False)),
            "stop_token_ids": draws.pick("stops", ((), (), (), (5, 9))),
            "prompt_logprobs_from": draws.pick("scores", (None, None, None, None, 0, wanted)),
        }

    def _cancel(self) -> Op | None:
        session = self._pick_talking()
        if session is None or session.live is None:
            return None
        keep = self._draws.pick("keep", (None, 0, 1, 3, 99, 99))
        return {"op": "cancel", "t": session.live.command.turn_id, "keep": keep}

    def _stop(self) -> Op | None:
        session = self._pick_talking()
        if session is None or session.live is None:
            return None
        keep = self._draws.pick("stop at", (1, 2, 4, 99))
        return {"op": "stop", "t": session.live.command.turn_id, "keep": keep}

    def _close(self) -> Op | None:
        sessions = list(self._world.sessions)
        if not sessions:
            return None
        draws = self._draws
        times = draws.pick("times", (1, 1, 1, 2))
        close = {"op": "close", "s": draws.pick("close", sessions), "times": times}
        if not self._is_tiered:
            return close
        return {**close, "deleted": draws.happens("deleted", 400)}

    def _cool(self) -> Op | None:
        session = self._pick(is_live=False)
        verb = "warm" if self._draws.happens("warms", 300) else "cool"
        return None if session is None else {"op": verb, "s": session.session_id}

    def _misbehave(self) -> Op | None:
        draws = self._draws
        what = draws.pick("misbehave", ("late", "duplicate", "busy", "unknown", "base", "vocab"))
        ended = self._world.stage.history.ended
        if what == "late":
            keep = draws.pick("late keep", (None, 0, 3))
            turn_id = draws.pick("late turn", ended[-9:]) if ended else "t0"
            return {"op": "late", "t": turn_id, "keep": keep}
        session = self._pick(is_live=what in {"duplicate", "busy"})
        if session is None:
            return None
        if what == "duplicate":
            assert session.live is not None, "picked so"
            return {"op": "duplicate", "t": session.live.command.turn_id}
        return {"op": "refused", "why": what, "s": session.session_id, "t": self._name("bad")}

    def _flush(self) -> Op:
        return {"op": "flush"}

    def _report(self) -> Op:
        return {"op": "report", "full": self._draws.pick("full", (True, False))}

    def _pick_talking(self) -> ServerSession | None:
        """Now and then one whose turn was retracted: they are few, and ending them is delicate."""
        if self._draws.happens("retracted", 300):
            for turn in self._world.stage.engine.inspect().scheduler.waiting:
                if turn.num_admissions > 0:
                    return self._world.sessions.get(turn.request.session_id)
        return self._pick(is_live=True)

    def _pick(self, *, is_live: bool) -> ServerSession | None:
        sessions = [s for s in self._world.sessions.values() if (s.live is not None) == is_live]
        return self._draws.pick("session", sessions) if sessions else None

    def _name(self, prefix: str) -> str:
        self._num_names += 1
        return f"{prefix}{self._num_names}"
