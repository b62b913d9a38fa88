"""Bugs in KV outside of the pools: what is copied, when, and what is told of it."""

from __future__ import annotations

from functools import partial
from typing import Final

from tests.mutants.mutant import Edit, Mutant
from tests.sim.config import FIRST_TIERED

_COPIES: Final = "cache.page_copies:PageCopies"
_TREE: Final = "cache.tiers.segment_tree:SegmentTree"
_ACCOUNT: Final = "cache.tiers.tier_account:TierAccount"
_STORE: Final = "session_server.engine.tiers.store:TierStore"
_UNREAD: Final = "session_server.engine.tiers.unread_files:UnreadFiles"
_SPILLING: Final = "session_server.engine.tiers.spilling:Spilling"
_TIERS: Final = "session_server.engine.tiers.tiers:Tiers"
_RESTORING: Final = "session_server.engine.tiers.restoring:Restoring"


def _mutant(
    bug: str,
    *edits: tuple[str, str, str],
    source: str = "systematic",
    first_seed: int = FIRST_TIERED,
) -> Mutant:
    return Mutant(bug, source, *(Edit(*edit) for edit in edits), first_seed=first_seed)


_on_disk = partial(_mutant, first_seed=FIRST_TIERED + 1_000_000)
"""A bug that shows only with files: the first of all seeds have few, those from here on many."""


# Pages on their way out

COPIED_PAGES_ARE_NOT_LOCKED = _mutant(
    "Pages that are being copied out can be evicted and written by others.",
    (
        f"{_COPIES}.begin_out",
        "return self._enter(Transit(self._next(), receipt, start, end, pages))",
        "stores.tree.unlock(receipt); receipt.length = 0; receipt = "
        "stores.tree.lock_root(namespace); "
        "return self._enter(Transit(self._next(), receipt, start, end, pages))",
    ),
)

COPIED_PAGES_STAY_LOCKED = _mutant(
    "Pages that were copied out stay locked.",
    (f"{_COPIES}.end_out", "self._stores.tree.unlock(transit.receipt)", "pass"),
)

VOID_COPY_IS_USED = _mutant(
    "A copy whose pages were found wrong while it was made is used.",
    (
        f"{_SPILLING}._end",
        "self._cache.copies.end_out(transit) and is_whole",
        "self._cache.copies.end_out(transit) or is_whole",
    ),
    (f"{_STORE}.clear", "self._num_clears += 1", "return"),
)

SPAN_BEGINS_A_PAGE_EARLY = _mutant(
    "A segment says that it has the page before its first one.",
    (
        f"{_SPILLING}._copy",
        "(each.first, each.end)",
        "(max(0, each.first - 1), each.end)",
    ),
)

NEXT_PAGE_IS_COPIED = _mutant(
    "The pages behind those that are wanted are copied in their place.",
    (
        f"{_COPIES}.begin_out",
        "held[component.pool][first : end // page_size]",
        "held[component.pool][max(0, first - 1) : end // page_size - (first > 0)]",
    ),
)

COPY_OUT_THAT_FAILED_IS_KEPT = _mutant(
    "A copy to host memory that failed is used.",
    (f"{_SPILLING}._end", "result.refusal is None", "True"),
)

DROPPED_COPY_IS_KEPT = _mutant(
    "A copy that ends after its segment was dropped stays in host memory for ever.",
    (f"{_STORE}.end_copy", "self.orders.forget_in_host(segment.number)", "pass"),
)

COPY_IS_USED_BEFORE_IT_ENDS = _mutant(
    "A segment is read while it is still being written.",
    (
        f"{_STORE}.enter_host",
        "self.host.add(segment)",
        "self.host.add(segment); segment.in_host = True",
    ),
    (f"{_STORE}.end_copy", "segment.in_host = True", "pass"),
)

# Pages on their way in

COMES_IN_UNVERIFIED = _mutant(
    "Pages are published although the copy into them failed.",
    (f"{_RESTORING}._end", "result.refusal is None and", ""),
    source="llama.cpp#26676",
)

FAILED_COPY_IN_KEEPS_PAGES = _mutant(
    "Pages into which a copy failed are never free again.",
    (
        f"{_COPIES}.end_in",
        "stores.allocators[pool].release(each.pages.tolist(), Holder.SPILL)",
        "pass",
    ),
)

WHAT_CAME_IN_STAYS_LOCKED = _mutant(
    "The path before pages that came in stays locked.",
    (f"{_COPIES}.end_in", "stores.tree.unlock(transit.receipt)", "pass"),
)

WHAT_COMES_IN_IS_FREE_TOO = _mutant(
    "What comes in is published while it is being written.",
    (
        f"{_COPIES}.begin_in",
        "return self._enter(transit)",
        "self._enter(transit); self._publish(transit); "
        "object.__setattr__(transit, 'tokens', tokens[start:end].copy()); return transit",
    ),
    (f"{_COPIES}.end_in", "self._publish(transit)", "pass"),
)

TWICE_COMPUTED_PAGE_IS_LOST = _mutant(
    "A page that came in, and that somebody has computed meanwhile, is lost.",
    (
        f"{_COPIES}._publish",
        "stores.allocators[pool].release(filter(None, twice), Holder.ACTIVE)",
        "pass",
    ),
)

TWICE_COMPUTED_PAGE_OF_OTHERS_IS_FREED = _mutant(
    "Where somebody has computed the same meanwhile, all pages that came in are freed.",
    (f"{_COPIES}._publish", "if mine != its]", "]"),
)

WINDOW_COMES_IN_A_PAGE_LATE = _mutant(
    "Of a window the first page that a forward reads does not come in.",
    (
        f"{_COPIES}.begin_in",
        "max(start // page_size, each.first_page(end))",
        "min(max(start // page_size, each.first_page(end) + each.is_bounded), end // page_size)",
    ),
)

FENCE_IS_FORGOTTEN = _mutant(
    "A copy into pages is ordered while forwards launched before may still write them.",
    (f"{_RESTORING}.release", "self._held[0].num_forwards <= num_settled", "True"),
)

FENCE_IS_ONE_SHORT = _mutant(
    "A copy into pages does not wait for the last forward launched before it.",
    (
        f"{_RESTORING}.release",
        "self._held[0].num_forwards <= num_settled",
        "self._held[0].num_forwards <= num_settled + 1",
    ),
)

REBUILD_FORGETS_THE_FENCE = _mutant(
    "After a rebuild the pages that a copy still writes are free.",
    ("cache.stores:_fence", "if transit.is_incoming", "if False"),
)

FENCED_PAGES_STAY_FENCED = _mutant(
    "Pages that a copy wrote during a rebuild are never free again.",
    (
        f"{_COPIES}._free_fenced",
        "self._stores.allocators[pool].release(ids, Holder.FENCED)",
        "pass",
    ),
)

GIVEN_UP_COPY_HAS_NO_FENCE = _on_disk(
    "The pages of a copy that was given up are free while it is still being made.",
    (
        f"{_COPIES}.abandon_in",
        "stores.ledgers[pool].transfer(len(each.pages), Holder.SPILL, Holder.FENCED)",
        "stores.allocators[pool].release(each.pages.tolist(), Holder.SPILL)",
    ),
    (f"{_COPIES}.abandon_in", "stores.fenced[transit.number] = fenced", "pass"),
)

COPY_OUTLIVES_ITS_QUARANTINE = _mutant(
    "Copies of memory that was found wrong are used.",
    (
        "session_server.engine.guard:MemoryGuard._quarantine",
        "self._tiers.clear()",
        "pass",
    ),
)

REBUILD_KEEPS_COPIES = _mutant(
    "After a rebuild what was copied before it is used.",
    ("session_server.engine.guard:MemoryGuard._rebuild", "self._tiers.clear()", "pass"),
)

# What is read for a page

WRONG_PAGE_OF_A_SEGMENT = _mutant(
    "Pages are read from the beginning of a segment, wherever they are in it.",
    (f"{_RESTORING}._parts", "(first - has_first, ids)", "(0, ids)"),
)

PART_BEGINS_WITH_THE_SEGMENT = _mutant(
    "The pages of a segment go where those of the one before it were to go.",
    (
        f"{_RESTORING}._parts",
        "wanted.pages[first - wanted.first : end - wanted.first]",
        "wanted.pages[: end - first]",
    ),
)

FIRST_PAGE_DECIDES = _mutant(
    "A segment is found by its first page, and the others are not compared.",
    (
        f"{_TREE}.find",
        "_common_pages(held, tokens[at:num_whole], page_size)",
        "min(len(held), num_whole - at) // page_size",
    ),
    source="TensorRT-LLM#8274",
)

CHAIN_IGNORES_THE_SALT = _mutant(
    "Files of all tenants have the same names.",
    (
        "cache.tiers.segment:first_chain",
        "(namespace.tenant_salt, namespace.model_fingerprint)",
        "(namespace.model_fingerprint,)",
    ),
)

SALTS_SHARE_A_TREE = _mutant(
    "Segments are found whatever their namespace.",
    (
        f"{_TREE}.find",
        "self._roots.get(namespace, {})",
        "next(iter(self._roots.values()), {})",
    ),
    (
        "cache.tiers.segment:first_chain",
        "(namespace.tenant_salt, namespace.model_fingerprint)",
        "(namespace.model_fingerprint,)",
    ),
)

CHAIN_IS_THAT_OF_ONE_PAGE = _mutant(
    "The name of a page does not depend on what is before it.",
    (
        "cache.tiers.segment:chains_after",
        "hashlib.blake2b(chain + data[at : at + page_bytes]",
        "hashlib.blake2b(data[at : at + page_bytes]",
    ),
)

ANY_LENGTH_GOES_ON = _mutant(
    "A path comes in to its end, whether a window and a state are there or not.",
    (f"{_TREE}.continuable_len", "if component.is_bounded:", "if False:"),
    source="llama.cpp#25913",
)

LAST_PART_IS_READ_WHOLE = _mutant(
    "Of a segment that another one follows in its middle all pages count.",
    (f"{_TREE}._entries", "min(end, part.end // self.page_size)", "end"),
)

# What is held where

PARENT_GOES_ALONE = _mutant(
    "A segment is dropped, and those that follow it stay.",
    (f"{_STORE}._let_go", "self.pace.drop(self.tree.remove(segment))", "self.tree.remove(segment)"),
)

STALE_PARENT = _mutant(
    "A segment is added behind one that has just been dropped.",
    (f"{_SPILLING}._copy", "has_room and store.tree.has(path)", "has_room"),
)

STALE_PARENT_ON_DISK = _on_disk(
    "A segment is written to disk that was dropped to make room for it.",
    (f"{_STORE}._write", "if self.tree.get(segment.number) is not segment:", "if False:"),
)

HOST_BYTES_LEAK = _mutant(
    "Host memory of a dropped segment stays counted.",
    (f"{_STORE}._let_go", "self.host.remove(segment)", "pass"),
)

DISK_BYTES_LEAK = _mutant(
    "A file that was not written stays counted.",
    (f"{_STORE}._end_writing", "self.disk.remove(segment)", "pass"),
)

SHARE_IS_NOT_REDUCED = _mutant(
    "What a tenant no longer has is counted for it.",
    (f"{_ACCOUNT}.remove", "-segment.content.num_bytes", "0"),
)

SHARE_OF_ANOTHER_TENANT = _mutant(
    "All tenants have one share of host memory and disk.",
    (f"{_TREE}.add", "tenant_tag(namespace.tenant)", "tenant_tag('')"),
)

BYTES_OF_TOKENS_ARE_FORGOTTEN = _mutant(
    "A segment counts as if it had one page of each pool.",
    (
        f"{_TREE}.add",
        "num_bytes=self.bytes_of(tokens, spans)",
        "num_bytes=self.bytes_of(first, {pool: (0, 1) for pool in spans})",
    ),
)

HOST_MEMORY_IS_NOT_FORGOTTEN = _mutant(
    "What leaves host memory for the disk is not freed.",
    (f"{_STORE}.leave_host", "self.orders.forget_in_host(segment.number)", "pass"),
)

UNFINISHED_COPY_GIVES_WAY = _on_disk(
    "A segment that is still being copied or written gives way.",
    (
        f"{_STORE}._may_leave_host",
        "not segment.in_host or segment.is_writing",
        "False",
    ),
)

FILE_OF_A_DROPPED_SEGMENT_STAYS = _mutant(
    "The file of a dropped segment stays.",
    (f"{_STORE}._let_go", "self._remove_file(segment)", "pass"),
)

FILE_WRITTEN_TOO_LATE_STAYS = _mutant(
    "A file that is complete when its segment was dropped stays.",
    (
        f"{_STORE}._end_writing",
        "self.orders.forget_file(segment.content.file_id)",
        "pass",
    ),
)

FILE_THAT_GAVE_WAY_STAYS = _on_disk(
    "A file that makes room for another one stays.",
    (f"{_STORE}._leave_disk", "self._remove_file(segment)", "pass"),
)

FILE_THAT_FAILED_IS_READ = _mutant(
    "A file that could not be written counts as written.",
    (f"{_STORE}._end_writing", "segment.on_disk = is_whole", "segment.on_disk = True"),
)

WRONG_FILE_IS_KEPT = _on_disk(
    "A file that is not what it should be is tried again and again.",
    (f"{_STORE}.refuse_file", "self.drop(segment)", "pass"),
)

WRONG_FILE_IS_ASKED_FOR = _on_disk(
    "A file is asked for as if it began where its segment ends.",
    (
        "session_server.core.tier_orders:FoundFile.of",
        "content.chain, content.start",
        "content.end_chain, content.start",
    ),
)

CLEAR_FORGETS_THE_DISK = _on_disk(
    "Who drops everything leaves the files.",
    (f"{_STORE}.clear", "self.orders.forget_all_files()", "pass"),
)

FOUND_FILE_HAS_NO_BYTES = _on_disk(
    "A file found on disk is not counted.",
    (f"{_STORE}._enter_found", "self.disk.add(segment)", "pass"),
)

FOUND_FILE_COUNTS_TWICE = _on_disk(
    "A file found on disk counts as unread still.",
    (f"{_STORE}._enter_found", "self._unread.pop(segment.content.name)", "pass"),
)

FOUND_FILE_HANGS_ANYWHERE = _on_disk(
    "A file found on disk is added wherever the path ends.",
    (
        f"{_STORE}._enter_found",
        "path.next_name != each.file.name or path.length != each.file.start",
        "path.next_name is None",
    ),
)

DISK_IS_OVERFULL = _on_disk(
    "Files that nobody has read are not counted when room is made.",
    (f"{_UNREAD}.add", "self._account.change(tag, num_bytes)", "pass"),
    (f"{_UNREAD}.pop", "self._account.change(tag, -num_bytes)", "pass"),
)

# What is done in slices

LIST_IS_ENTERED_TWICE = _on_disk(
    "A file that was found while the disk was listed counts as unread too.",
    ("session_server.engine.tiers.listing:Listing.note_found", "if not self.is_over:", "if False:"),
)

REST_OF_THE_LIST_IS_FORGOTTEN = _on_disk(
    "Of the files from before only those of the first slice are known.",
    (
        "session_server.engine.tiers.listing:Listing.enter",
        "for _ in range(min(num_files, len(self._listed))):",
        "for _ in range(min(1, len(self._listed))) if not len(self._unread) else ():",
    ),
)

DELETED_LATER_IS_NEVER_DELETED = _mutant(
    "What a deleted session left waits for another one to be deleted.",
    (
        "session_server.engine.tiers.forgetting:Forgetting._drop_some",
        "while self._waiting:",
        "while len(self._waiting) > 1:",
    ),
)

# Sessions and turns

DELETED_SESSION_LEAVES_SEGMENTS = _mutant(
    "A deleted session leaves what only it had.",
    (f"{_SPILLING}.forget", "if is_deleted and", "if False and"),
)

UNKNOWN_SESSION_LEAVES_SEGMENTS = _mutant(
    "A deleted session that the engine does not know leaves what only it had.",
    (
        f"{_TIERS}.forget",
        "self._forgetting.add(Forgotten(namespace, tokens, num_kept, then=then))",
        "pass",
    ),
)

DELETED_SESSION_TAKES_THOSE_OF_OTHERS = _mutant(
    "A deleted session takes what another one has too.",
    (
        f"{_STORE}.drop_unshared",
        "segment.num_sessions or self.is_followed(segment)",
        "segment.children",
    ),
)

CLOSED_SESSION_STAYS_DIRTY = _mutant(
    "A closed session waits to be copied.",
    (f"{_SPILLING}.forget", "self._forget_dirty(session_id)", "pass"),
)

RUNNING_SESSION_IS_DIRTY = _mutant(
    "A session with a turn waits to be copied.",
    (f"{_SPILLING}.note_turn", "self._forget_dirty(session_id)", "pass"),
)

DIRTY_TOKENS_ARE_COUNTED_TWICE = _mutant(
    "A session whose turn has ended counts twice among those that were not copied.",
    (f"{_SPILLING}.note_rest", "self._forget_dirty(session_id)", "self._dirty.pop(session_id, 0)"),
)

ENDS_ARE_NOT_COUNTED = _mutant(
    "A session that goes on leaves its mark where it ended before.",
    (f"{_SPILLING}._set_last", "before.num_sessions -= 1", "pass"),
)

COPY_NEVER_ENDS = _mutant(
    "A session counts as being copied once one of its segments was.",
    (f"{_SPILLING}._note_end", "if not self._copying[session_id]:", "if False:"),
)

COOL_WAITS_FOR_NOTHING = _mutant(
    "A session that is to be cooled is held although its copy cannot begin.",
    (
        f"{_SPILLING}.holds",
        "is_begun and session_id in self._copying",
        "True",
    ),
)

TURN_IS_NEVER_RESUMED = _mutant(
    "A turn whose copy has ended is not told.",
    (f"{_RESTORING}._finish", "then(end)", "pass"),
)

SECOND_WAITER_IS_FORGOTTEN = _mutant(
    "Of those that wait for one copy only the first is told.",
    (f"{_RESTORING}.begin", "self._waiting[session_id] += waiting", "pass"),
)

FAILED_COPY_LETS_WAIT = _mutant(
    "A turn waits for ever for a copy that failed.",
    (
        f"{_RESTORING}._end",
        "        self._finish(copy.session_id)",
        "        if is_whole:\n            self._finish(copy.session_id)",
    ),
)

SEARCH_LETS_WAIT = _on_disk(
    "A turn waits for ever where the disk had nothing.",
    (f"{_RESTORING}._go_on", "self._finish(wish.session_id)", "pass"),
)

LONG_SESSION_IS_COPIED_FOR_EVER = _mutant(
    "A session that is longer than all tiers pushes out its own beginning, again and again.",
    (
        "session_server.engine.tiers.spilling:_Dirty.may_be_tried_again",
        "self.num_tries < _MAX_TRIES",
        "True",
    ),
)

ENDS_WITHOUT_WRITING = _on_disk(
    "An engine ends at once, whatever is not on disk.",
    (
        f"{_TIERS}.is_draining",
        "self._spilling.has_dirty or self._spilling.is_copying or self.store.is_writing",
        "False",
    ),
)

ENDS_DURING_A_COPY = _on_disk(
    "An engine that is to end does not wait for what is copied to host memory.",
    (f"{_TIERS}.is_draining", "self._spilling.is_copying or", ""),
)

ENDS_WITH_THE_FIRST_REFUSAL = _on_disk(
    "An engine that is to end does so once the disk has no room for one segment.",
    (f"{_STORE}.write_ahead", "while self._write_next(", "if self._write_next("),
)

END_HAS_NO_LIMIT = _on_disk(
    "An engine that is to end writes for as long as there is something.",
    (f"{_TIERS}.take_orders", "now_s >= self._drain_until_s", "False"),
)

END_GOES_ON_AS_BEFORE = _mutant(
    "An engine whose time to end has passed writes on, whatever that pushes out.",
    (f"{_STORE}._write_next", "or self.writes.is_over", ""),
    first_seed=2_060_001_065,
)

ONLY_COPIES_BEFORE_ITS_END = _on_disk(
    "An engine that is to end copies to host memory, which ends with it, and writes no file.",
    (f"{_TIERS}.take_orders", "self.store.write_ahead()", "pass"),
)

END_PUSHES_OUT_WHAT_IT_WROTE = _on_disk(
    "An engine that is to end pushes out what it has just written with what was used before.",
    (f"{_STORE}._make_room_for", "other.used_ns < segment.used_ns or not is_own", "True"),
    (f"{_STORE}.may_be_written", "return next_to_give is not None and not is_later", "return True"),
)

ENDED_TURN_IS_RESUMED = _mutant(
    "A turn that has ended meanwhile waits again when its copy ends.",
    (
        "session_server.engine.scheduler:Scheduler._restore",
        "if turn.state is TurnState.RESTORING:",
        "if True:",
    ),
)

RESTORING_TURN_STAYS_IN_LINE = _mutant(
    "A turn whose KV is being copied is in the line as well.",
    ("session_server.engine.scheduler:Scheduler._restore", "self.waiting.remove(turn)", "pass"),
)

DRAFT_IS_FORGOTTEN = _mutant(
    "A draft whose session's KV was copied first is forgotten.",
    (
        "session_server.engine.input_drafts:InputDrafts._begin_pending",
        "self._pending[session_id] = _Draft(command)",
        "pass",
    ),
)

STOPPED_DRAFT_COMES_BACK = _mutant(
    "A draft that a turn has replaced begins when the copy it waited for ends.",
    (
        "session_server.engine.input_drafts:InputDrafts.stop",
        "self._restoring.pop(session_id, None)",
        "pass",
    ),
)

OLD_DRAFT_IS_COMPUTED = _mutant(
    "Of the drafts that wait for one copy the first is computed.",
    (
        "session_server.engine.input_drafts:InputDrafts.submit",
        "self._restoring[session_id] = command",
        "self._restoring.setdefault(session_id, command)",
    ),
)

PAGES_AHEAD_ARE_NEVER_USED = _mutant(
    "What was copied ahead of turns counts when they have it.",
    (
        f"{_RESTORING}.note_used",
        "self._num_unused[unused.room] -= unused.num_pages",
        "pass",
    ),
)

DOUBT_LETS_COPIES_COME_IN = _mutant(
    "A copy back of what was found wrong meanwhile is used.",
    (f"{_RESTORING}._end", " and self._num_clears == copy.num_clears", ""),
)

DEFERRED_COPIES_ARE_FORGOTTEN = _mutant(
    "A session that waits for the copies of others is never copied.",
    (f"{_RESTORING}.begin_deferred", "while self._deferred:", "while False:"),
)

DEFERRED_TURN_IS_NOT_RESUMED = _mutant(
    "A turn whose copy finds no pages when its time comes waits for ever.",
    (f"{_RESTORING}.begin_deferred", 'self._finish(session_id, "no pages")', "pass"),
)
