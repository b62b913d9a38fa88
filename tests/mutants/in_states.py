"""Bugs in recurrent states: which are kept, which become snapshots, and where they lead back to."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant
from tests.sim.config import FIRST_OF_STATES

MARK_STATE_IS_GIVEN_BACK = Mutant(
    "A running turn gives the state back that a cancel would lead to.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.release_superseded", "kept = (mark_len, ", "kept = ("),
)

PAGE_END_STATE_IS_GIVEN_BACK = Mutant(
    "The state at the last whole page is given back before it is published.",
    "systematic",
    Edit(
        "cache.lease_states:LeaseStates.release_superseded",
        "computed_len - computed_len % self._stores.page_size, computed_len)",
        "computed_len)",
    ),
)

OLD_STATES_STAY = Mutant(
    "A running turn keeps every state it has come by.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.release_superseded", "and n not in kept", "and False"),
)

STATES_AHEAD_ARE_GIVEN_BACK = Mutant(
    "With a result, the states that later forwards will leave are given back too.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.release_superseded", "n <= computed_len and ", ""),
)

LAST_STATE_GOES_WITH_THOSE_BEYOND = Mutant(
    "Who forgets what lies beyond a length loses the state at that length.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.drop_beyond", "if n > length]", "if n >= length]"),
)

STATES_REST_WITH_THE_SESSION = Mutant(
    "A parked session keeps what states its turn had.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.keep_only", "if n != length]", "if n > length]"),
)

LAST_STATE_IS_NOT_LONG_ENOUGH = Mutant(
    "A canceled turn does not lead back to a state that is just as long as asked for.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.longest_len", "if n <= length)", "if n < length)"),
)

NO_STATE_ON_THE_WAY = Mutant(
    "A forward over the end of a page leaves no state there.",
    "systematic",
    Edit(
        "cache.lease_states:LeaseStates._written_lengths",
        "if computed_len < last_whole < certain_len",
        "if 0",
    ),
)

STATE_IS_OVERWRITTEN = Mutant(
    "A forward that begins at the end of a page writes the state there anew, which it reads.",
    "systematic",
    Edit(
        "cache.lease_states:LeaseStates._written_lengths",
        "computed_len < last_whole < certain_len",
        "computed_len <= last_whole < certain_len",
    ),
)

SNAPSHOT_IS_A_PAGE_LATE = Mutant(
    "The state before a page is published as the one after it.",
    "systematic",
    Edit(
        "cache.lease_states:LeaseStates.take_snapshots",
        "self._pages.pop(end, NULL_PAGE)",
        "self._pages.pop(end - page_size, NULL_PAGE)",
    ),
)

SNAPSHOT_IS_COPIED = Mutant(
    "A state that is published stays its session's own as well.",
    "systematic",
    Edit(
        "cache.lease_states:LeaseStates.take_snapshots",
        "self._pages.pop(end, NULL_PAGE)",
        "self._pages.get(end, NULL_PAGE)",
    ),
)

SNAPSHOT_RETURNS_A_PAGE_EARLY = Mutant(
    "A snapshot taken back counts as the state of a page before.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.put_snapshots_back", "start + 1", "start"),
)

SNAPSHOT_TAKEN_BACK_IS_LOST = Mutant(
    "A snapshot taken back is nobody's.",
    "systematic",
    Edit("cache.lease_states:LeaseStates.put_snapshots_back", "if page != NULL_PAGE:", "if False:"),
)

SNAPSHOT_TAKEN_BACK_STAYS_IN_THE_ROW = Mutant(
    "A row goes on to name a snapshot that was taken back from the tree.",
    "systematic",
    Edit(
        "cache.lease:KVLease.roll_back",
        "self._stores.rows.clear(pool, self.row, start, start + len(pages))",
        "pass",
    ),
)

SNAPSHOT_IS_NOT_IN_THE_ROW = Mutant(
    "A session does not know of the snapshots it has published.",
    "systematic",
    Edit(
        "cache.lease:KVLease.publish",
        "self._repoint(pool, start, known + ours[pool][len(known) :])",
        "self._repoint(pool, start, known)",
    ),
)

SNAPSHOTS_ARE_NOT_PUBLISHED = Mutant(
    "Pages are published without the state at their end.",
    "systematic",
    Edit(
        "cache.lease:KVLease.publish",
        "self.states.take_snapshots(start, num_pages)",
        "[NULL_PAGE] * num_pages",
    ),
)

SNAPSHOT_OF_THE_NEXT_PAGE = Mutant(
    "A turn goes on from the snapshot that is one page further.",
    "systematic",
    Edit(
        "cache.lease:KVLease._state_page",
        "entries[length // stores.page_size - 1]",
        "entries[length // stores.page_size]",
    ),
)

LAUNCH_AHEAD_BEGINS_WHERE_IT_IS_SETTLED = Mutant(
    "A forward ahead of results goes on from the last state that is settled.",
    "systematic",
    Edit(
        "cache.lease:KVLease.state_moves",
        "self.state_at(start)",
        "self.state_at(self.computed_len)",
    ),
)

CUT_NEEDS_NO_STATE = Mutant(
    "A session is cut to any length, whether there is a state of it or not.",
    "systematic",
    Edit(
        "cache.lease:KVLease.rewound_len",
        "max(snapshot, self.states.longest_len(reach))",
        "max(snapshot, reach)",
    ),
)

STATES_ARE_NOT_GIVEN_BACK = Mutant(
    "A lease given back forgets its states.",
    "systematic",
    Edit(
        "cache.lease:KVLease.release",
        "self.states.drop_beyond(0, self.holder)",
        "pass",
    ),
)

STATES_ARE_NOT_LENT = Mutant(
    "States stay in their account when their session is lent or parked.",
    "systematic",
    Edit("cache.lease:KVLease._transfer_private", "self.states.transfer(source, target)", "pass"),
)

STATES_ARE_NOT_COUNTED = Mutant(
    "What a forward leaves is bought without asking whether as many states are free.",
    "systematic",
    Edit(
        "cache.lease:KVLease.missing_pages",
        "self.states.num_missing(self.computed_len, to_len, num_drafts)",
        "0",
    ),
)

MATCH_NEEDS_NO_SNAPSHOT = Mutant(
    "A path is matched to the end of its last whole page, snapshot or not.",
    "systematic",
    Edit(
        "cache.components:RecurrentState.continuable_len",
        "(first + int(kept[-1]) + 1) * self._page_size if len(kept) else 0",
        "length - length % self._page_size",
    ),
)

FIRST_SNAPSHOT_IS_TAKEN = Mutant(
    "Who comes back goes on from the first snapshot of a path, not from the last.",
    "systematic",
    Edit("cache.components:RecurrentState.continuable_len", "int(kept[-1])", "int(kept[0])"),
)

SNAPSHOT_BEYOND_IS_TAKEN = Mutant(
    "A session that is cut inside a page goes on from the snapshot at the page's end.",
    "systematic",
    Edit(
        "cache.components:RecurrentState.continuable_len",
        "length // self._page_size - first",
        "pages_for(length, self._page_size) - first",
    ),
)

SNAPSHOT_IS_NOT_LOCKED = Mutant(
    "The snapshot that a session goes on from can be evicted.",
    "systematic",
    Edit(
        "cache.components:RecurrentState.first_page",
        "pages_for(length, self._page_size) - 1",
        "pages_for(length, self._page_size)",
    ),
)

ALL_SNAPSHOTS_ARE_LOCKED = Mutant(
    "A session locks every snapshot of its path.",
    "systematic",
    Edit(
        "cache.components:RecurrentState.first_page",
        "max(0, pages_for(length, self._page_size) - 1)",
        "0",
    ),
)

ROW_COMES_WITH_TOO_FEW_STATES = Mutant(
    "States are planned for sessions at rest, and not for turns that run.",
    "systematic",
    Edit(
        "cache.capacity:_rows_with_states",
        "num_rows * per_row + 1",
        "num_rows * 2 + 1",
    ),
)

GUESSES_LEAVE_ONE_STATE = Mutant(
    "A forward that verifies drafts leaves one state, after all of them.",
    "mlx-lm#1109 (A10)",
    Edit(
        "cache.lease_states:LeaseStates._written_lengths",
        "range(certain_len, to_len + 1)",
        "[to_len]",
    ),
)

LAST_GUESS_LEAVES_NO_STATE = Mutant(
    "A forward that verifies drafts leaves no state after the last of them.",
    "systematic",
    Edit(
        "cache.lease_states:LeaseStates._written_lengths",
        "range(certain_len, to_len + 1)",
        "range(certain_len, max(to_len, certain_len + 1))",
    ),
)

PROBE_BEGINS_WITH_ITS_END = Mutant(
    "A page is computed again from the state after it.",
    "systematic",
    Edit("cache.lease:KVLease.kept_states", "self.state_at(start)", "self._state_page(end)"),
)

PROBE_COMPARES_THE_STATE_BEFORE = Mutant(
    "A probe takes the state before a page for the one after it.",
    "systematic",
    Edit("cache.lease:KVLease.kept_states", "self._state_page(end)", "self._state_page(start)"),
)

ROWS_WITHOUT_STATES = Mutant(
    "Rows are handed out whose states are in quarantine.",
    "systematic",
    Edit("cache.views:Headroom.of", "num_rows += -states.num_quarantined", "num_rows += 0"),
    first_seed=2_060_001_580,
)

FORGOTTEN_STATES_STAY = Mutant(
    "What forwards behind a failed one would have left stays beside what is computed again.",
    "systematic",
    Edit("cache.session_cache:SessionAwareCache.forget_launches", "lease.computed_len", "1 << 30"),
    first_seed=FIRST_OF_STATES,
)
