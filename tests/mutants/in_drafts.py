"""Bugs in drafts of input: what is computed ahead, kept, given up and answered."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant
from tests.sim.config import FIRST_DRAFTING

ABANDONED_DRAFT_LEAKS = Mutant(
    "The pages of a draft that was dropped stay with its session.",
    "systematic",
    Edit("cache.tails:Tails.drop", "lease.rewind(lease.base_len)", "pass"),
    first_seed=FIRST_DRAFTING,
)

DRAFT_IS_SAID = Mutant(
    "What was drafted stays in the history.",
    "systematic",
    Edit(
        "cache.session_slot:SessionSlot.forget_tail",
        "self.tokens.truncate(self.history_len)",
        "pass",
    ),
    first_seed=FIRST_DRAFTING,
)

WRONG_PREFIX_IS_KEPT = Mutant(
    "A turn keeps all of a draft that it has only begun like.",
    "systematic",
    Edit(
        "cache.session_slot:SessionSlot.common_len",
        "int(differs[0]) if len(differs) else len(tail)",
        "len(tail)",
    ),
    first_seed=FIRST_DRAFTING,
)

DRAFT_GOES_BEFORE_TURNS = Mutant(
    "Drafts take the tokens of a forward although a turn waits.",
    "systematic",
    Edit(
        "session_server.engine.engine:Engine._num_spare",
        "not plan.work or plan.blocked is not None",
        "not plan.work",
    ),
    first_seed=FIRST_DRAFTING,
)

DRAFTS_FILL_FORWARDS = Mutant(
    "Drafts take all that turns leave of a forward, which takes as long as a full one.",
    "systematic",
    Edit(
        "session_server.engine.engine:Engine._num_spare",
        "min(share_len(self._limits.num_tokens), num_left)",
        "num_left",
    ),
    first_seed=FIRST_DRAFTING,
)

DRAFTS_QUEUE_FORWARDS = Mutant(
    "A forward of drafts is launched behind another one, and a turn that comes waits for both.",
    "systematic",
    Edit(
        "session_server.engine.engine:Engine._next_draft_batch", "if self._in_flight:", "if False:"
    ),
    first_seed=FIRST_DRAFTING,
)

FAILED_DRAFT_IS_KEPT = Mutant(
    "What a forward with a number that is not finite made of a draft is kept.",
    "systematic",
    Edit(
        "session_server.engine.input_drafts:InputDrafts.settle",
        "outcome is None or not outcome.finite",
        "outcome is None",
    ),
    first_seed=FIRST_DRAFTING,
)

DRAFT_GOES_ON_UNDER_ITS_TURN = Mutant(
    "A turn that comes does not end the draft of its session.",
    "systematic",
    Edit(
        "session_server.engine.command_handler:CommandHandler._submit",
        "self._input_drafts.stop(command.session_id)",
        "pass",
    ),
    first_seed=FIRST_DRAFTING,
)

PIN_OF_A_COLD_SESSION_STAYS = Mutant(
    "A pinned session that has lost its lease still counts for the quota.",
    "systematic",
    Edit(
        "cache.parked_queue:ParkedQueue.remove_cold",
        "if slot.retention is Retention.PINNED:",
        "if False:",
    ),
    first_seed=FIRST_DRAFTING,
)

HELD_DRAFT_IS_LOST = Mutant(
    "A draft that came while a turn ran is never computed.",
    "systematic",
    Edit("session_server.sessions.drafts:SessionDrafts._send", "draft.is_sent = True", "pass"),
    first_seed=FIRST_DRAFTING,
)

BYTES_OF_A_DRAFT_LEAK = Mutant(
    "A draft that another has replaced while it was tokenized counts for ever.",
    "systematic",
    Edit(
        "session_server.sessions.drafts:SessionDrafts._on_built", "if not is_newest:", "if False:"
    ),
    first_seed=FIRST_DRAFTING,
)
