"""Seeded bugs of access: of keys, quotas and floods, each with the test that finds it.

Clients of the simulator have keys that stay and hardly ever flood it, so it finds none of these.
Each names a test of the suite, which `test_access_gate.py` runs with the bug and expects to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

from tests.mutants.mutant import Edit, Mutant


class Caught:
    """A seeded bug and the test that finds it: "module:function", with `given` of its parameters;
    the others are fixtures.
    """

    __slots__ = ("by", "given", "mutant")

    def __init__(self, bug: str, edit: Edit, by: str, **given: object) -> None:
        self.mutant = Mutant(bug, "systematic", edit)
        self.by = by
        self.given: Mapping[str, object] = MappingProxyType(given)

    @property
    def test(self) -> Callable[..., None]:
        """The test."""
        module, _, name = self.by.partition(":")
        found: Callable[..., None] = getattr(import_module(module), name)
        return found


CAUGHT: Final = (
    Caught(
        "A key that was taken back goes on working on the sockets that it has opened.",
        Edit(
            "session_server.web.authenticator:Authenticator.revoke",
            "revocable.end(CloseCode.UNAUTHORIZED)",
            "pass",
        ),
        "tests.web.test_key_watch:test_what_a_revoked_key_opened_is_ended_in_slices",
        num_revocables=1,
    ),
    Caught(
        "A key that was taken back opens what it opened before.",
        Edit(
            "session_server.web.keys:KeyRing.apply",
            "self._buckets, self._owners = change.buckets, change.owners",
            "self._buckets, self._owners = self._buckets | change.buckets, change.owners",
        ),
        "tests.web.test_keys:test_keys_are_replaced_and_an_owner_that_stays_is_granted_what_its"
        "_line_says",
    ),
    Caught(
        "A server whose last key was taken back is open.",
        Edit("session_server.web.keys:KeyRing.credential_of", "self.is_open", "not self._buckets"),
        "tests.web.test_keys:test_a_ring_whose_keys_are_all_gone_lets_nobody_in",
    ),
    Caught(
        "Every key of a key file is an operator's.",
        Edit(
            "session_server.web.keys:KeySources.owners",
            "is_admin=grant.is_admin or self.path is None",
            "is_admin=True",
        ),
        "tests.web.test_keys:test_only_lines_that_say_so_make_an_admin",
    ),
    Caught(
        "The id of another key's session is answered 403, and an unknown one 404.",
        Edit(
            "session_server.sessions.registry:SessionRegistry.get",
            "raise SessionNotFound(_NOT_FOUND)",
            "from session_server.web.refusals import HttpRefusal\n"
            "            if any(session_id in owned for owned in self._by_owner.values()):\n"
            '                raise HttpRefusal(403, "not yours")\n'
            "            raise SessionNotFound(_NOT_FOUND)",
        ),
        "tests.web.test_access:test_what_another_key_owns_is_as_unknown_as_what_never_was",
    ),
    Caught(
        "A ticket may be used twice.",
        Edit("session_server.web.tickets:Tickets.redeem", "self._drop(digest)", "pass"),
        "tests.web.test_tickets:test_a_ticket_is_used_once_and_before_it_expires",
    ),
    Caught(
        "A ticket does not expire.",
        Edit(
            "session_server.web.tickets:Tickets.redeem",
            "if self._now_s() < unused.expires_s else None",
            "",
        ),
        "tests.web.test_tickets:test_a_ticket_is_used_once_and_before_it_expires",
    ),
    Caught(
        "A ticket of one tenant opens a session of another that has a ticket too.",
        Edit(
            "session_server.web.tickets:Tickets.redeem",
            "return unused.credential",
            "return next(iter(self._unused.values()), unused).credential",
        ),
        "tests.web.test_tickets:test_what_a_ticket_opens_is_its_owners",
    ),
    Caught(
        "A ticket outlives the key that it was made for.",
        Edit(
            "session_server.web.authenticator:Authenticator.redeem",
            "credential is None or not self._keys.has(credential)",
            "credential is None",
        ),
        "tests.web.test_tickets:test_a_ticket_ends_with_the_key_it_was_made_for",
    ),
    Caught(
        "A tenant may have one connection more than its quota.",
        Edit(
            "session_server.web.readers:Readers.__init__",
            "limit_of=lambda owner: owner.limits.max_connections",
            "limit_of=lambda owner: (owner.limits.max_connections or 1 << 20) + 1",
        ),
        "tests.web.test_quotas:test_a_connection_too_many_is_refused_until_another_ends",
    ),
    Caught(
        "A tenant may hold one more of what is counted than its quota.",
        Edit(
            "session_server.sessions.budget:OwnerBudget.check",
            "if held > allowed:",
            "if held - 1 > allowed:",
        ),
        "tests.sessions.test_budget:test_an_owner_limit_is_bounded_to_the_unit",
    ),
    Caught(
        "A tenant is refused the last of what its quota allows.",
        Edit(
            "session_server.sessions.budget:OwnerBudget.check",
            "if held > allowed:",
            "if held >= allowed:",
        ),
        "tests.sessions.test_budget:test_an_owner_limit_is_bounded_to_the_unit",
    ),
    Caught(
        "A tenant may ask for one turn a minute more than its quota.",
        Edit(
            "session_server.sessions.rates:OwnerRate.check",
            "debt.num_owed + amount - rate)",
            "debt.num_owed + amount - rate - 1)",
        ),
        "tests.sessions.test_quotas:test_turns_per_minute_refill_and_the_refusal_says_when",
    ),
    Caught(
        "Output beyond the quota does not hold back a turn that waited while it was written.",
        Edit(
            "session_server.sessions.quotas:Quotas.reserve",
            "self.output_rate.check(session.owner, 1, now_s=now_s)",
            "pass",
        ),
        "tests.sessions.test_quotas:test_output_holds_back_turns_that_waited_while_it_was_written",
    ),
    Caught(
        "A line of the key file that sets no quota has none, whatever the server's default is.",
        Edit(
            "session_server.web.keys:KeySources.owners",
            "grant.limits.or_else(self.limits)",
            "grant.limits",
        ),
        "tests.web.test_keys:test_a_key_has_the_limits_of_its_line_and_for_the_rest_those_of_the"
        "_server",
    ),
    Caught(
        "`Retry-After` is a second, however long the quota takes to refill.",
        Edit(
            "session_server.web.refusals:_retry_after",
            "str(body.retry_after_s or 1)",
            '"1"',
        ),
        "tests.web.test_quotas:test_a_client_that_waits_as_long_as_it_is_told_succeeds",
        limits={"turns_per_min": 2},
        wait_s=30,
    ),
    Caught(
        "`retry_after_s` is a second, however long the quota takes to refill.",
        Edit(
            "session_server.protocol.errors:wait_of",
            "max(1, math.ceil(wait_s or 0.0))",
            "1",
        ),
        "tests.web.test_quotas:test_a_socket_that_waits_as_long_as_it_is_told_succeeds",
        limits={"turns_per_min": 2},
        wait_s=30,
    ),
    Caught(
        "A tenant that was away comes first until it was served as much as all others ever were.",
        Edit(
            "session_server.engine.tenant_lines:TenantLines.served",
            "max(self._served.get(tenant, 0), self._now - CREDIT_TOKENS)",
            "self._served.get(tenant, 0)",
        ),
        "tests.engine.test_tenants:test_a_tenant_that_was_away_comes_first_for_as_long_as_its_credit",
    ),
    Caught(
        "A turn is admitted with pages that other tenants lack of their minimums.",
        Edit(
            "cache.views:TenantShare.reserved_pages",
            "tenants.unheld[pool] - mine[pool]",
            "0 * mine[pool]",
        ),
        "tests.cache.test_tenants:test_its_own_minimum_is_there_for_a_tenant_that_comes_back",
    ),
    Caught(
        "A plan that left all others out for turns without pages is the last one.",
        Edit(
            "session_server.engine.plan:StepPlan.is_empty",
            "return is_idle and not self.load.has_postponed",
            "return is_idle",
        ),
        "tests.engine.test_tenants:test_others_are_not_left_out_for_a_tenant_that_lacks_pages",
    ),
    Caught(
        "A turn is ended because all who could go on were left out of the forward.",
        Edit(
            "session_server.engine.plan:plan_step",
            "not (work or has_postponed or view.is_in_flight)",
            "not (work or view.is_in_flight)",
        ),
        "tests.engine.test_tenants:test_others_are_not_left_out_for_a_tenant_that_lacks_pages",
    ),
    Caught(
        "In a flood a forward is planned behind the one in flight.",
        Edit(
            "session_server.engine.engine:Engine._next_batch",
            "retry_alone or self._scheduler.waiting.load.is_flood",
            "retry_alone",
        ),
        "tests.engine.test_tenants:test_in_a_flood_no_forward_is_planned_behind_another",
    ),
    Caught(
        "In a flood forwards are as long as ever.",
        Edit(
            "session_server.engine.plan_tokens:_split_by_tenant",
            "num_tokens = sum(parts)",
            "pass",
        ),
        "tests.engine.test_tenants:test_until_its_first_token_a_quiet_tenant_waits_for_half_of_its"
        "_prompt_more",
        prompt_len=64,
        flood_len=2000,
    ),
    Caught(
        "A short forward of a flood is split among many long turns.",
        Edit(
            "session_server.engine.plan_tokens:_split_by_tenant",
            "share=part // 2 + 1 if is_flood else None",
            "share=None",
        ),
        "tests.engine.test_tenants:test_a_short_forward_of_a_flood_goes_to_one_long_turn_behind"
        "_what_is_short",
    ),
)
