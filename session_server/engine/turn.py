"""`Turn`: tokens known, positions computed and what is in flight, of one turn.

Lengths are absolute positions of the session's context. Between launch and settle they are an
interval: `computed_len` is settled, `launched_len` is what the forwards in flight will have
computed if every draft in them is accepted. The planner works with the upper end. Settling raises
the lower end, and lowers the upper end again where drafts were rejected.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from cache.types import Tokens, TurnId
from cache.views import TurnLoan
from session_server.core.commands import SubmitTurn
from session_server.core.events import TurnTimings


class TurnState(enum.Enum):
    """Name the states of a turn in the engine; `TRANSITIONS` has the legal changes.

    COMPILING: it waits for its grammar, and then for admission. RESTORING: it waits for a copy of
    its session's KV, and then for admission.
    """

    COMPILING = enum.auto()
    WAITING = enum.auto()
    RESTORING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


TRANSITIONS: Final[Mapping[TurnState, frozenset[TurnState]]] = {
    TurnState.COMPILING: frozenset({TurnState.WAITING, TurnState.FINISHED}),
    TurnState.WAITING: frozenset({TurnState.RUNNING, TurnState.RESTORING, TurnState.FINISHED}),
    TurnState.RESTORING: frozenset({TurnState.WAITING, TurnState.FINISHED}),
    TurnState.RUNNING: frozenset({TurnState.WAITING, TurnState.FINISHED}),
    TurnState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """Propose the tokens behind the next one.

    `num_drafts`: how many. `tokens`: int32 [num_drafts]; None if the runner's draft model makes
    them.
    """

    num_drafts: int
    tokens: Tokens | None


@dataclass(slots=True, eq=False)
class Pace:
    """Count what several turns do together, one token each per forward: see `engine.decoding`.

    `num_launched`, `num_settled`: forwards. `forward_s`: seconds of those settled.
    """

    num_launched: int = 0
    num_settled: int = 0
    forward_s: float = 0.0


ALONE: Final = Pace()
"""The pace of a turn that shares none; it never changes."""


@dataclass(slots=True)
class Admission:
    """Track one stay among the running turns, from admission to end or retraction.

    `loan`: the lease of the session, with the row and the settled lengths. `attempt`: tells this
    stay, and each retry in it, from earlier ones, whose late results are dropped. `launched_len`:
    see the module. `num_sampling`: launched rows whose token the host has not seen.
    `is_sampler_started`: whether the runner was sent the `SamplingStart` of this attempt. `draft`:
    what the next forward may verify. `pace`: what is added to its own numbers.
    """

    loan: TurnLoan
    attempt: int
    own_launched_len: int
    own_num_sampling: int = 0
    is_sampler_started: bool = False
    draft: Draft | None = None
    pace: Pace = ALONE

    @property
    def launched_len(self) -> int:
        """Return the positions launched, settled ones included."""
        return self.own_launched_len + self.pace.num_launched

    @launched_len.setter
    def launched_len(self, length: int) -> None:
        """Set it."""
        self.own_launched_len = length - self.pace.num_launched

    @property
    def num_sampling(self) -> int:
        """Return how many launched rows have tokens that the host has not seen."""
        return self.own_num_sampling + self.pace.num_launched - self.pace.num_settled

    @num_sampling.setter
    def num_sampling(self, count: int) -> None:
        """Set it."""
        self.own_num_sampling = count - self.pace.num_launched + self.pace.num_settled

    @property
    def computed_len(self) -> int:
        """Return the positions whose KV is settled."""
        return self.loan.computed_len

    @property
    def num_spare(self) -> int:
        """Return the positions that pages already held can still take."""
        return self.loan.capacity_len - self.launched_len


@dataclass(slots=True)
class TurnClock:
    """Track when things happened to a turn, in the seconds given to `Engine.step`, and how often.

    `times_bypassed`: turns admitted before it while it waited for pages. `restored_for`: the
    admission, counted from 1, for which its session's KV was copied back.
    """

    submitted_s: float
    admitted_s: float | None = None
    prompt_done_s: float | None = None
    first_token_s: float | None = None
    num_retractions: int = 0
    times_bypassed: int = 0
    restored_for: int = 0
    pace: Pace = ALONE
    own_forward_s: float = 0.0
    own_num_steps: int = 0

    @property
    def forward_s(self) -> float:
        """Return the seconds of the forwards that the turn took part in."""
        return self.own_forward_s + self.pace.forward_s

    @property
    def num_steps(self) -> int:
        """Return how many forwards those were."""
        return self.own_num_steps + self.pace.num_settled

    def add_forward(self, forward_s: float) -> None:
        """Count a forward that it alone settles."""
        self.own_forward_s += forward_s
        self.own_num_steps += 1

    def timings(self, now_s: float) -> TurnTimings:
        """Return the durations so far; a stage that was not reached ends now or took no time."""
        admitted_s = now_s if self.admitted_s is None else self.admitted_s
        prompt_done_s = now_s if self.prompt_done_s is None else self.prompt_done_s
        first_token_s = now_s if self.first_token_s is None else self.first_token_s
        return TurnTimings(
            queue_ms=(admitted_s - self.submitted_s) * 1e3,
            prefill_ms=(max(prompt_done_s, admitted_s) - admitted_s) * 1e3,
            ttft_ms=(first_token_s - self.submitted_s) * 1e3,
            decode_ms=(now_s - first_token_s) * 1e3,
            forward_ms=self.forward_s * 1e3,
            num_steps=self.num_steps,
        )


@dataclass(slots=True, eq=False)
class Turn:
    """Track one submitted turn.

    `order`: smaller is admitted earlier and keeps its pages longer. `max_new`: output tokens it may
    have: its `max_tokens`, clipped to what its context leaves. `outputs` survive a retraction: they
    are input of the next admission. `num_prompt_logprobs`: reported so far. `cached_len`: positions
    that its first admission did not compute. `draft_len`: how many drafts it proposes next, adapted
    to how many were accepted; 0 before the first draft.
    """

    request: SubmitTurn
    order: tuple[float, int]
    max_new: int
    clock: TurnClock
    state: TurnState = TurnState.WAITING
    admission: Admission | None = None
    outputs: list[int] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    num_admissions: int = 0
    cached_len: int = 0
    draft_len: int = 0
    _input: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self._input = np.array(self.request.tokens, dtype=np.int32)

    @property
    def turn_id(self) -> TurnId:
        """Return the id of the turn."""
        return self.request.turn_id

    @property
    def prompt_len(self) -> int:
        """Return the length of the context it was submitted with."""
        return self.request.base_len + len(self.request.tokens)

    @property
    def known_len(self) -> int:
        """Return how many tokens of the context the host has seen."""
        request = self.request
        return request.base_len + len(request.tokens) + len(self.outputs)

    @property
    def expected_len(self) -> int:
        """Return `known_len` and the tokens that forwards in flight sample. Only while running."""
        return self.known_len + self.current_admission.num_sampling

    @property
    def max_computed_len(self) -> int:
        """Return the positions it ever computes: its last output token needs no KV."""
        return self.prompt_len + max(0, self.max_new - 1)

    @property
    def current_admission(self) -> Admission:
        """Return the admission of a running turn."""
        assert self.admission is not None, "only a running turn has an admission"
        return self.admission

    @property
    def num_uncomputed(self) -> int:
        """Return the positions that can be launched now; those in flight count as done.

        `max_new` is known ahead, so no forward is planned past it. 0 for a turn that is held back.
        """
        admission = self.current_admission
        num_sampling = admission.num_sampling
        if num_sampling and self.is_held_back:
            return 0
        length = min(self.known_len + num_sampling, self.max_computed_len)
        return max(0, length - admission.launched_len)

    @property
    def is_held_back(self) -> bool:
        """Return whether it must not be launched before a result comes.

        It has drafts to place behind a token in flight, or its own drafts are being verified.
        """
        admission = self.current_admission
        if admission.num_sampling == 0:
            return False
        return admission.draft is not None or admission.launched_len >= self.expected_len

    @property
    def is_decoding(self) -> bool:
        """Return whether it lacks only the position of its latest token, known or in flight."""
        return self.current_admission.launched_len == self.expected_len - 1

    @property
    def num_launches(self) -> int:
        """Return in how many forwards it still takes part if each computes one position."""
        return self.max_computed_len - self.current_admission.launched_len

    def is_plainly_decoding(self, num_unseen: int) -> bool:
        """Return whether its next forwards compute one position and sample one token each, with
        `num_unseen` such forwards in flight."""
        admission, clock = self.current_admission, self.clock
        num_ahead = admission.launched_len - admission.computed_len
        return (
            num_ahead == admission.num_sampling == num_unseen
            and self.is_decoding
            and self.num_launches > 0
            and admission.is_sampler_started
            and admission.draft is None
            and None not in (clock.prompt_done_s, clock.first_token_s)
            and self.request.sampling.prompt_logprobs_from is None
        )

    @property
    def num_drafts(self) -> int:
        """Return how many drafts the next forward may verify behind its one certain position.

        None while a forward of it is in flight, be it of its prompt: a row has no states for both.
        """
        admission = self.current_admission
        if admission.draft is None or admission.launched_len != admission.computed_len:
            return 0
        return admission.draft.num_drafts if self.num_uncomputed == 1 else 0

    def keep_pace(self, pace: Pace) -> None:
        """Count forwards with other turns from now on."""
        admission, clock = self.current_admission, self.clock
        launched_len, num_sampling = admission.launched_len, admission.num_sampling
        forward_s, num_steps = clock.forward_s, clock.num_steps
        admission.pace = clock.pace = pace
        admission.launched_len, admission.num_sampling = launched_len, num_sampling
        clock.own_forward_s = forward_s - pace.forward_s
        clock.own_num_steps = num_steps - pace.num_settled

    def uncommitted_tokens(self) -> Tokens:
        """Return everything after `base_len`, input then output: int32 [n].

        Every plan asks for it while the turn waits, so the input is converted once.
        """
        if not self.outputs:
            return self._input
        return np.concatenate((self._input, np.array(self.outputs, dtype=np.int32)))

    def next_prompt_logprob_position(self) -> int | None:
        """Return the first position whose logits still have to give a prompt logprob.

        None if the turn asks for no prompt logprobs. The logits at a position give the logprob of
        its successor, so they start one before the first token asked for; position 0 has none.
        """
        wanted_from = self.request.sampling.prompt_logprobs_from
        if wanted_from is None:
            return None
        return max(0, wanted_from + self.num_prompt_logprobs - 1)

    @property
    def is_compiling(self) -> bool:
        """Return whether it waits for its grammar."""
        return self.state is TurnState.COMPILING

    def wait(self) -> None:
        """Start to wait for admission: its grammar was compiled."""
        self._move(TurnState.WAITING)

    def restore(self) -> None:
        """Wait for a copy of its session's KV, once per admission."""
        self._move(TurnState.RESTORING)
        self.clock.restored_for = self.num_admissions + 1

    def resume(self, *, is_restored: bool) -> None:
        """Wait for admission again; if its session's KV was not copied, that is tried once more."""
        self._move(TurnState.WAITING)
        if not is_restored:
            self.clock.restored_for = self.num_admissions

    @property
    def is_restored(self) -> bool:
        """Return whether its session's KV was copied back for the next admission, as far as it
        could."""
        return self.clock.restored_for > self.num_admissions

    def admit(self, loan: TurnLoan) -> None:
        """Start to run on a lease that was just lent."""
        self._move(TurnState.RUNNING)
        self.num_admissions += 1
        self.admission = Admission(loan, self.num_admissions, loan.cached_len)
        if self.num_admissions == 1:
            self.cached_len = min(loan.cached_len, self.prompt_len)

    def discard_in_flight(self) -> None:
        """Forget what is in flight: it is computed again, and its results are dropped."""
        admission = self.current_admission
        self.num_admissions += 1
        admission.attempt = self.num_admissions
        admission.launched_len = admission.computed_len
        admission.num_sampling = 0
        admission.is_sampler_started = False
        admission.draft = None

    def retract(self) -> None:
        """Return to waiting. Outputs stay, KV does not."""
        self._move(TurnState.WAITING)
        self.admission = None
        self.clock.num_retractions += 1

    def finish(self) -> None:
        """End the turn. Nothing follows."""
        self._move(TurnState.FINISHED)
        self.admission = None

    def _move(self, state: TurnState) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} does not become {state}"
        self.state = state
