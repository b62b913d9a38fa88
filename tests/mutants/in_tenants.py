"""Bugs in what is shared among tenants: turns' order, the tree's pages, and what quotas count."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

TENANT_IS_NOT_CHARGED = Mutant(
    "A tenant is not charged for what it sends.",
    "systematic",
    Edit(
        "session_server.engine.tenant_lines:TenantLines.charge",
        "self._add(turn.request.tenant, _cost(turn))",
        "pass",
    ),
)

ANSWER_IS_NOT_CHARGED = Mutant(
    "A tenant is not charged for what it is answered.",
    "systematic",
    Edit(
        "session_server.engine.tenant_lines:TenantLines.charge_outputs",
        "self._add(turn.request.tenant, len(turn.outputs))",
        "pass",
    ),
)

RETRACTED_TURN_PAYS_AGAIN = Mutant(
    "A tenant is charged for its input each time that its turn is admitted.",
    "systematic",
    Edit(
        "session_server.engine.tenant_lines:_cost",
        "0 if turn.num_admissions else len(turn.request.tokens)",
        "len(turn.request.tokens)",
    ),
)

PRIORITY_IS_WORTH_NOTHING = Mutant(
    "Between tenants the priority of a turn does not count.",
    "systematic",
    Edit(
        "session_server.engine.tenant_lines:_worth",
        "turn.request.priority * PRIORITY_TOKENS",
        "0",
    ),
)

MINIMUM_IS_EVICTED = Mutant(
    "Who has most in the tree gives its minimum too, while others have more than theirs.",
    "systematic",
    Edit(
        "cache.tenants:Tenants.next_to_give",
        "num_evictable - account.guarded[pool] or num_evictable",
        "num_evictable",
    ),
)

WEIGHT_IS_IGNORED = Mutant(
    "Pressure takes from the tenant with most pages in the tree, whatever its share is.",
    "systematic",
    Edit(
        "cache.tenants:Tenants._recount",
        "-account.held[pool] * _RESOLUTION // account.weight",
        "-account.held[pool]",
    ),
)

ENDED_TURN_HOLDS_KV = Mutant(
    "A turn that ended early is counted with the KV of the answer that it might have given.",
    "systematic",
    Edit(
        "session_server.sessions.turn_conclusion:TurnConclusion._release",
        "self._quotas.rest_kv(session)",
        "pass",
    ),
)

COLD_SESSION_HOLDS_KV = Mutant(
    "KV that was lost is still counted against its owner.",
    "systematic",
    Edit(
        "session_server.sessions.residents:Residents.mark_cold",
        "self._quotas.rest_kv(session)",
        "pass",
    ),
)

KV_IS_LOST_UNDER_A_PROMPT = Mutant(
    "KV that is lost while the next turn is tokenized is still counted when that is canceled.",
    "systematic",
    Edit(
        "session_server.sessions.residents:Residents.mark_cold",
        " or session.live.submitted is None",
        "",
    ),
)

WAITING_TURN_HIDES_KV = Mutant(
    "The KV of a session whose turn the engine could not take is not counted.",
    "systematic",
    Edit(
        "session_server.sessions.quotas:Quotas.release",
        "self.rest_kv(session)",
        "self.hold_kv(session, 0)",
    ),
)

CLOSED_SESSION_HOLDS_KV = Mutant(
    "The KV of a session that was closed is still counted against its owner.",
    "systematic",
    Edit(
        "session_server.sessions.quotas:Quotas.unload_session",
        "self.hold_kv(session, 0)",
        "pass",
    ),
)

LOST_CONNECTION_COUNTS = Mutant(
    "A connection that has ended still counts among those of its owner.",
    "systematic",
    Edit(
        "session_server.web.readers:Readers.connected",
        "with self._budget.held(owner, 1):",
        "with contextlib.nullcontext(self._budget.take(owner)):",
    ),
)
