"""The numbers of the code that size slices, caches and records, and those that bound nothing."""

from __future__ import annotations

from tests.docs.constant import Constant
from tests.docs.constant import constant as _constant

_NEXT = "the rest comes next; others are served in between"
_OLDEST = "the oldest is dropped"


SLICES = (
    _constant("web.listener:ACCEPTS_AT_ONCE", "connections accepted", "connections", _NEXT),
    _constant("web.http_guard:PARSE_BYTES", "bytes of a request parsed", "bytes", _NEXT),
    _constant("web.websocket_guard:PARSE_BYTES", "bytes of a frame parsed", "bytes", _NEXT),
    _constant(
        "web.http_guard:LEAST_PARSE_BYTES",
        "bytes of either parsed, behind some that held many parts; twice as many each time",
        "bytes",
        _NEXT,
    ),
    _constant(
        "engine_host.event_slices:EVENTS_AT_ONCE",
        "events of the engine handed on; outputs of one turn that wait are one",
        "events",
        _NEXT,
    ),
    _constant("sessions.journal:READ_BYTES", "journal entries that a reader takes", "bytes", _NEXT),
    _constant("web.turnstile:MESSAGES_AT_ONCE", "messages on sockets let in", "messages", _NEXT),
    _constant("web.connection_table:EVICTED_AT_ONCE", "connections evicted", "connections", _NEXT),
    _constant("web.sockets:ENDED_AT_ONCE", "sockets ended by a shutdown", "sockets", _NEXT),
    _constant("sessions.rates:PAID_AT_ONCE", "owners whose rates may be paid", "owners", _NEXT),
    _constant(
        "web.authenticator:REVOKED_AT_ONCE",
        "sockets and requests of revoked keys ended",
        "",
        _NEXT,
    ),
    _constant(
        "web.revoked_owners:CLOSED_AT_ONCE",
        "sessions, responses and conversations closed of a tenant whose last key was revoked",
        "of each",
        _NEXT,
    ),
    _constant("web.tickets:DROPPED_AT_ONCE", "expired tickets dropped", "tickets", _NEXT),
    _constant("web.sglang:ABORTED_AT_ONCE", "requests that abort_all ends", "requests", _NEXT),
    _constant(
        "protocol.growing_json:SLICE_LENGTH",
        "entries of a long answer that are encoded",
        "entries",
        _NEXT,
    ),
    _constant(
        "web.socket_peer:WRITE_BYTES",
        "frames for a socket in one write",
        "bytes",
        "the rest comes next; a larger frame is written alone",
    ),
    _constant(
        "protocol.realtime:ITEMS_AT_ONCE",
        "items of a session that a Realtime conversation takes over",
        "items",
        _NEXT,
    ),
    _constant("web.slices:ENCODED_AT_ONCE", "such answers that are encoded", "answers", _NEXT),
    _constant(
        "protocol.scores:SCORES_AT_ONCE",
        "tokens with logprobs that are encoded with their frame",
        "tokens",
        "those of a longer answer are encoded in slices",
    ),
    _constant(
        "protocol.cumulative_answer:MAX_UNPACED_BYTES",
        "an SGLang stream's answer that every token sends whole",
        "bytes",
        "a longer one is sent when it has grown, and at the end",
    ),
    _constant(
        "protocol.cumulative_answer:PACED_PARTS",
        "part by which a longer one has grown then: one of",
        "parts",
        "fewer tokens wait for the next event",
    ),
    _constant("sessions.backlog:SLICE", "sessions that one change concerns", "items", _NEXT),
    _constant(
        "sessions.store.writer:MAX_GROUP", "writes to the store in one commit", "writes", _NEXT
    ),
    _constant(
        "sessions.session_logs:MAX_REWRITTEN_BYTES",
        "sessions that are written again once a write has failed",
        "bytes",
        "the rest a second later; so is all but the first 64, and but one while the disk fails",
    ),
    _constant(
        "sessions.store.session_store:ENTRIES_AT_ONCE",
        "entries of a stored session that are read",
        "entries",
        _NEXT,
    ),
    _constant(
        "sessions.store.writer:LATER_AT_ONCE",
        "deletions in one commit, of sessions whose time is over and of parts of long ones",
        "writes",
        _NEXT,
    ),
    _constant(
        "sessions.store.writer:GATHER_S",
        "that a commit waits for more writes, where the one before had several",
        "s",
        "what comes later is in the next one",
    ),
    _constant(
        "sessions.store.writer:ERASED_EVERY_S",
        "between two times that the log of a store is emptied for the sake of what was deleted",
        "s",
        "the text stays in the log until then, or until nobody reads it",
    ),
    _constant(
        "sessions.stored_ends:AT_ONCE",
        "sessions on disk that expire, and deleted ones whose tokens were kept, that are gone "
        "before others are read",
        "of each",
        _NEXT,
    ),
    _constant(
        "sessions.store.session_store:SHARED_ENTRIES",
        "entries of a session that one question to a shared store answers",
        "entries",
        _NEXT,
    ),
    _constant("sessions.store.session_store:SHARED_BYTES", "bytes of them", "bytes", _NEXT),
    _constant("sessions.shared_sessions:ENTRIES_APPLIED", "of them applied", "entries", _NEXT),
    _constant(
        "sessions.postgres.leases:RELEASED_AT_ONCE",
        "sessions that one transaction gives up",
        "sessions",
        _NEXT,
    ),
    _constant(
        "sessions.postgres.notifications:_SLICE_S",
        "time that one look for notifications of PostgreSQL takes",
        "s",
        "another look follows",
    ),
    _constant(
        "sessions.postgres.connections:_RECONNECT_S",
        "time that connections to PostgreSQL are tried anew by themselves",
        "s",
        "the next read has it tried again",
    ),
    _constant(
        "sessions.store.deleted_rows:DELETED_ENTRIES",
        "entries of a session that one write deletes",
        "entries",
        "the rest is hidden, and comes next",
    ),
    _constant(
        "sessions.store.deleted_rows:DELETED_BYTES",
        "bytes of entries that one write deletes; a single one may exceed it",
        "bytes",
        "the rest is hidden, and comes next",
    ),
    _constant(
        "sessions.store.session_store:PARTS_AT_ONCE",
        "items of a conversation on disk that are read",
        "items",
        _NEXT,
    ),
    _constant(
        "sessions.store.session_store:BYTES_AT_ONCE",
        "bytes of these entries and items, after which no further one is read",
        "bytes",
        _NEXT,
    ),
    _constant(
        "sessions.response_turns:CHAINED_AT_ONCE",
        "responses without their session that are read for one which goes on from them",
        "responses",
        _NEXT,
    ),
    _constant(
        "sessions.store.deletions:RETRIED_AT_ONCE",
        "sessions that are deleted again once that has failed",
        "sessions",
        "the rest a second later",
    ),
    _constant(
        "sessions.stored_ends:MAX_TOLD_TOKENS",
        "tokens of deleted sessions that the engine is told, to drop their KV",
        "tokens",
        "the rest a second later",
    ),
    _constant(
        "sessions.record_log:RETRIED_AT_ONCE",
        "responses and conversations that are written again once that has failed",
        "records",
        "the rest a second later",
    ),
    _constant(
        "sessions.store.directories:_PIECE_BYTES",
        "bytes of a store's log that are written again at a time when it is opened",
        "bytes",
        _NEXT,
    ),
    _constant(
        "session_command:LISTED_AT_ONCE",
        "sessions that `sessions list` reads before it prints them and lets others have the store",
        "sessions",
        _NEXT,
    ),
    _constant(
        "sessions.store.lock:_LOOK_S",
        "time after which a server looks again whether a command has its store open",
        "s",
        _NEXT,
    ),
    _constant(
        "sessions.store.reads:_PAGE_ROWS",
        "sessions read by `sessions list` and `doctor`",
        "sessions",
        _NEXT,
    ),
    _constant("sessions.turn_flow:RETRY_TOKENS", "history sent to a new engine", "tokens", _NEXT),
    _constant("sessions.replay:ENTRIES_PER_SLICE", "journal entries dropped", "entries", _NEXT),
    _constant("sessions.replay:SWEPT_PER_ENTRY", "places of dropped entries", "places", _NEXT),
    _constant(
        "sessions.tokenizing:NUM_THREADS",
        "long inputs that are tokenized at the same time",
        "inputs",
        "further ones wait",
    ),
    _constant(
        "engine.settle:LOGPROBS_PER_EVENT", "prompt logprobs in one event", "positions", _NEXT
    ),
    _constant(
        "engine.plan_budget:MAX_COOLED",
        "idle sessions cooled, and one for each running turn",
        "sessions",
        _NEXT,
    ),
    _constant(
        "engine.tiers.store:_NUM_TRIED",
        "copies of KV that are looked at for one that gives way",
        "copies",
        "the new copy is not made",
    ),
    _constant(
        "engine.tiers.pace:NUM_PER_STEP",
        "files of KV from before that are entered, those that give way to others on the disk, and "
        "copies that are let go of or passed over",
        "files",
        _NEXT,
    ),
    _constant(
        "engine.tiers.forgetting:_TOKENS_PER_STEP",
        "histories of deleted sessions whose KV is dropped",
        "tokens",
        _NEXT,
    ),
    _constant(
        "engine.tiers.forgetting:_LEAST_TOKENS",
        "such a history that is short counts",
        "tokens",
        "one that is longer counts what it has",
    ),
    _constant(
        "engine.tiers.erasing:_ITEM_TOKENS",
        "a deleted history whose files in a shared directory are to go counts beside its own",
        "tokens",
        "it counts that",
    ),
    _constant(
        "runner.shared_deletion:_PAGES_PER_STEP",
        "pages of deleted histories that are gone through",
        "pages",
        _NEXT,
    ),
    _constant(
        "engine.tiers.store:_NUM_AHEAD",
        "copies of KV that are looked at for one to write ahead of need",
        "copies",
        "the next one is written once the first of these have given way",
    ),
    _constant(
        "runner.segment_format:_BLOCK_BYTES",
        "bytes of KV on disk that share a checksum",
        "bytes",
        "the next ones have another",
    ),
    Constant(
        "cache.pool.page_copy:BLOCK_BYTES",
        "bytes of KV that a copy takes of a GPU beside its pools",
        "bytes",
        "the rest is copied next",
    ),
    _constant("engine.memory:SLICE_UNITS", "sessions, edges or rows recounted", "units", _NEXT),
    Constant(
        "cache.room:EVICTED_AHEAD",
        "pages evicted beyond those that a turn takes",
        "pages",
        _NEXT,
    ),
    Constant(
        "cache.recount:_PAGES_PER_UNIT",
        "pages that count as one such unit",
        "pages",
        "more pages are more units",
    ),
    Constant(
        "cache.lazy_heap:SWEPT_PER_PUSH",
        "places of free runs and evictable edges that are void",
        "places",
        _NEXT,
    ),
    Constant(
        "cache.lazy_heap:SWEPT_PER_REMOVAL",
        "such places, and segments in order, for each that is removed",
        "places",
        _NEXT,
    ),
    Constant(
        "cache.recount:_EDGES_PER_UNIT",
        "edges of a path that count as one such unit",
        "edges",
        "more edges are more units",
    ),
    Constant(
        "cache.recount:MAX_CHANGED",
        "units for what has changed since, and two for each turn that runs",
        "units",
        _NEXT,
    ),
    Constant(
        "cache.recount:_FREED_PER_UNIT",
        "records of a recount that are dropped for one such unit",
        "records",
        _NEXT,
    ),
    _constant(
        "runner.model_runner:PROMPT_LOGPROB_BLOCK",
        "prompt logprobs computed at a time",
        "positions",
        _NEXT,
    ),
    _constant(
        "runner.truncation:NUM_CANDIDATES",
        "tokens sorted for top-p on a CPU",
        "tokens",
        "more are sorted where these are not enough",
    ),
)

RECORDS = (
    _constant(
        "sessions.turn_names:MAX_NAMED_TURNS",
        "names of turns and drafts that were sent",
        "names",
        _OLDEST,
    ),
    _constant(
        "sessions.overview:MEASURED_TURNS",
        "turns of a session that `/v1/admin/sessions` measures",
        "turns",
        "earlier ones are left out",
    ),
    _constant(
        "metrics.recent:MAX_RECENT_TURNS",
        "times to the first token between two samples",
        "turns",
        "further ones are left out",
    ),
    _constant(
        "web.timeline:MAX_UNSETTLED",
        "forwards of the timeline that wait for their results",
        "forwards",
        _OLDEST,
    ),
    _constant("engine.trace:NUM_STEPS", "engine steps in the trace", "steps", _OLDEST),
    _constant("engine.trace:MAX_TRACED", "rows and decisions in them", "entries", _OLDEST),
    _constant(
        "engine.memory:NUM_LOGGED_STEPS",
        "steps before a violation that are logged",
        "steps",
        "earlier ones are in the trace alone",
    ),
    _constant(
        "engine.ngram:WINDOW",
        "a session's last tokens that drafts come from",
        "tokens",
        "earlier ones are not looked at",
    ),
    _constant(
        "wiring:_TOKEN_TEXTS_KEPT",
        "texts of single tokens, for logprobs",
        "texts",
        "the one unused for longest is dropped",
    ),
    _constant(
        "metrics.log_handler:_KINDS_KEPT",
        "kinds of warnings that are counted",
        "kinds",
        "counting begins again",
    ),
)

ONLY_WEIGHTS = ("session_server.sessions.footprint",)
"""Modules whose numbers say what something counts for."""

ARITHMETIC = (
    "session_server.runner.fp8",
    "session_server.runner.mla_weights",
    "session_server.runner.mxfp4",
    "session_server.runner.probe",
    "session_server.runner.quantization",
    "session_server.runner.randomness",
    "session_server.models.layers.gated_delta",
)
"""Modules whose numbers are parts of formulas and formats."""

HARMLESS_BEGINNINGS = ("EXIT_", "MIN_", "NULL_", "M_")
"""Exit statuses, floors, reserved indices, names of the C library."""

BOUND_NOTHING = frozenset(
    {
        # How often the lease is renewed within its time, and how soon somebody looks again.
        "session_server.sessions.store.lease:RENEWALS",
        "session_server.sessions.store.lease:RETRY_S",
        "session_server.sessions.store.lease:_LISTEN_S",
        "session_server.sessions.shared_sessions:ASK_AGAIN_S",
        "session_server.sessions.shared_sessions:_FIRST_LOOK_S",
        "session_server.sessions.shared_sessions:_LAST_LOOK_S",
        "session_server.sessions.session_logs:_PART_LOOK_S",
        "session_server.sessions.place_counter:SLOTS",
        "session_server.sessions.postgres.notifications:_PROBE_S",
        # What part of a lease a renewal waits for, and the largest number there is.
        "session_server.sessions.postgres.leases:_FIRST_RENEWAL",
        "session_server.sessions.postgres.notifications:_LAST_NUMBER",
        # How often replicas are looked for and whoever waits is told, what speaks for a home, and
        # sizes of what replicas say to each other.
        "session_server.sessions.roles.asking:PEERS_S",
        "session_server.sessions.roles.serving:BEAT_S",
        "session_server.sessions.roles.policy:_HELD_DIVISOR",
        "session_server.sessions.roles.policy:_SLACK",
        "session_server.sessions.roles.messages:_MAC_BYTES",
        "session_server.runner.segment_format:_MAC_BYTES",
        "session_server.sessions.roles.messages:_TIME_BYTES",
        "session_server.sessions.roles.serving:_TOKEN_BYTES",
        # Names in PostgreSQL: locks, nobody's id, a version; and a size that never changes.
        "session_server.sessions.postgres.holdings:_NO_SLOT",
        "session_server.sessions.postgres.leases:_JOINING",
        "session_server.sessions.postgres.reads:NO_REPLICA",
        "session_server.sessions.postgres.schema:_ANSWER_SLACK_S",
        "session_server.shared_store:_LOOK_S",
        "session_server.sessions.postgres.schema:_LOCK",
        "session_server.sessions.postgres.schema:_OLDEST",
        "session_server.sessions.postgres.schema:_SECRET_BYTES",
        # In what weights are counted, and places in an order.
        "cache.tenants:WHOLE_WEIGHT",
        "session_server.sessions.quotas:_ANY",
        "session_server.sessions.rates:_MINUTE_S",
        "cache.tenants:_LAST",
        "cache.tenants:_RESOLUTION",
        # Parts of file formats, and of a bound that is listed.
        "session_server.sessions.store.pieces:_TOKEN_BYTES",
        "session_server.sessions.store.pieces:_LEAST_BYTES",
        "session_server.sessions.store.pieces:_PIECE_BYTES",
        "session_server.models.gguf.reader:DEFAULT_ALIGNMENT",
        "session_server.models.gguf.reader:_ARRAY",
        "session_server.models.gguf.reader:_STRING",
        "session_server.models.gguf.reader:_PLACE_BYTES",
        "session_server.models.layers.block_weight:BLOCK",
        "session_server.runner.measured_weights:_PANEL",
        "session_server.runner.packed_formats:WORD_BITS",
        # How much is converted at a time.
        "session_server.models.layers.block_weight:CHUNK_ELEMENTS",
        "session_server.sessions.registry:_LAST_ORDER",
        # Of the store: what marks its file, and the bytes of a secret and a checksum.
        "session_server.sessions.store.schema:APPLICATION_ID",
        "session_server.sessions.store.database:_SECRET_BYTES",
        "session_server.sessions.store.log_frames:FRAME_HEADER_BYTES",
        "session_server.sessions.store.log_frames:LOG_HEADER_BYTES",
        "session_server.sessions.store.records:_CHECKSUM_BYTES",
        "session_server.sessions.store.session_file:_VERSION",
        # Of a file: what its digests have, and what the places of its items fit into.
        "session_server.sessions.store.imported:_DIGEST_BYTES",
        "session_server.sessions.store.imported:_END_LENS",
        # The end of every calendar.
        "session_server.sessions.store.records:LAST_S",
        # Of a store's rows: from when on they expire, and before which version they had no size.
        "session_server.sessions.stored_ends:_LEAST_S",
        "session_server.sessions.store.clock:EARLIEST_S",
        "session_server.sessions.store.schema:_UNSIZED",
        "session_server.sessions.store.disk_health:_PRIMARY",
        # How much of a digest is shown.
        "session_server.web.key_store:SHORT_DIGEST_CHARS",
        # Of what is known of copies of KV: the bytes of a hash, and what one counts for.
        "cache.tiers.segment:NAME_BYTES",
        "cache.tiers.segment:TAG_BYTES",
        "cache.tiers.segment_tree:SEGMENT_BYTES",
        "session_server.engine.tiers.store:_KNOWN_FILE_BYTES",
        "session_server.engine.tiers.unread_files:UNREAD_FILE_BYTES",
        "session_server.engine.tiers.use_clock:_USE_NS",
        # What a copy costs until it was measured, and what the newest measurement weighs.
        "session_server.engine.tiers.costs:_FORGIVING",
        "session_server.engine.tiers.disk_watch:_SLOW_DISK_PER_S",
        "session_server.engine.tiers.costs:_ORDER_S",
        "session_server.engine.tiers.costs:_WEIGHT",
        # How often something happens.
        "session_server.engine.reporting:STATS_INTERVAL_S",
        "session_server.web.server_watch:SAMPLE_INTERVAL_S",
        "session_server.engine_host.watchdog:PULSE_INTERVAL_S",
        "session_server.metrics.throughput:REST_S",
        "session_server.web.request_log:_CLIENT_GONE",
        "session_server.engine_wiring:_PROGRESS_INTERVAL_S",
        # What the chunk of a prompt is chosen between; --chunked-prefill-size is the bound.
        "session_server.engine_wiring:CHUNK_S",
        "session_server.progress:LINE_INTERVAL_S",
        "session_server.web.app:LAG_PROBE_S",
        "session_server.web.app:TICK_S",
        "session_server.web.drain:TELL_INTERVAL_S",
        "session_server.web.server:LOOK_S",
        "session_server.web.tls:_RECORD_BYTES",
        "session_server.web.tls_records:_HEAD_BYTES",
        "session_server.web.listener:_QUIET_S",
        "session_server.engine_host.audit_pace:AUDIT_PAUSE_RATIO",
        "session_server.engine_host.audit_pace:BUSY_PAUSE_RATIO",
        "session_server.engine_host.audit_pace:REST_DELAY_S",
        "session_server.engine_host.audit_pace:REST_PAUSE_RATIO",
        "session_server.text.grammar_child:_NICENESS",
        # What something counts for, or how one unit becomes another.
        "session_server.engine_host.inbox:_ITEM_BYTES",
        "session_server.engine_host.inbox:_VALUE_BYTES",
        "session_server.engine_host.inbox:_CHAR_BYTES",
        "session_server.core.grammar:COMPILED_BYTES",
        "session_server.core.grammar:COMPILED_BYTES_PER_BYTE",
        "session_server.engine_host.progress:STALL_RATIO",
        "session_server.engine_host.progress:_DECAY",
        "session_server.models.config:STATE_BYTES",
        "session_server.protocol.realtime_conversation:ITEM_BYTES",
        "session_server.protocol.realtime_conversation:WIDE_CHAR_BYTES",
        "session_server.protocol.realtime_conversation:UNTOLD",
        "session_server.sessions.prompt:_PROBE_CHARS_PER_TOKEN",
        "session_server.sessions.answer_grammar:_TAIL_TOKENS",
        "session_server.protocol.frames:SCORE_CHARS",
        "session_server.sessions.prompt:NUM_TAIL",
        "session_server.sessions.request_tree:NODE_BYTES",
        "session_server.sessions.agreement:DIGEST_BYTES",
        "session_server.sessions.kept_conversations:CONVERSATION_BYTES",
        "session_server.sessions.kept_conversations:ENTRY_BYTES",
        "session_server.sessions.responses:RESPONSE_BYTES",
        "session_server.sessions.tokenizing:MESSAGE_CHARS",
        "session_server.sessions.tokenizing:_BYTES_PER_CHAR",
        "session_server.sessions.validation:_CHARS_PER_TOKEN",
        "session_server.text.template_values:_INT_END",
        "session_server.text.template_worker:_UTF8_BYTES",
        "session_server.web.http_guard:QUEUED_REQUEST_BYTES",
        "session_server.web.http_guard:MANY_PARTS",
        "session_server.web.tls:MANY_RECORDS",
        "session_server.web.tls_records:RECORD_MEMORY_BYTES",
        "session_server.web.websocket_guard:FRAGMENT_BYTES",
        # From where on another way of doing the same is cheaper.
        "cache.components:_FIRST_BLOCK",
        "cache.pair_check:_SHORT",
        "cache.pool.page_copy:_HUGE_BYTES",
        "cache.room:_HIGH_WATER_DIVISOR",
        "cache.lockstep:LOW_WATER_DIVISOR",
        "session_server.attention.mla:BLOCK_LEN",
        "session_server.attention.recurrent:CHUNK",
        "session_server.engine_host.child:READ_BYTES",
        "session_server.engine_host.process:READ_BYTES",
        "session_server.models.checkpoint_files:PIECE_BYTES",
        "session_server.parallel.rank:READ_BYTES",
        "session_server.parallel.ranks:READ_BYTES",
        "session_server.models.checkpoint_files:_READ_BYTES",
        "session_server.runner.host_memory:LOADING_THRESHOLD",
        "session_server.runner.host_memory:SERVING_THRESHOLD",
        "session_server.runner.truncation:_CANDIDATES_GROWTH",
        "session_server.text.tokenizer:LONG_TEXT_CHARS",
        # What follows from the design: states that a row holds, levels of checks, marks.
        "cache.checker:_EVERYTHING",
        "cache.page_locks:TOMBSTONE_COUNT",
        "cache.spec:STATES_IN_FLIGHT",
        "cache.spec:STATES_PER_ROW",
        "session_server.engine.memory:NUM_LEVELS",
        # Of replicas: the length of a tag, how often somebody looks, over what loads are averaged.
        "session_server.deploy.routing:TAG_CHARS",
        "session_server.deploy.head:_LOOK_S",
        "session_server.deploy.head:PROXY_LOOK_S",
        "session_server.deploy.head:_TAIL_LINES",
        "session_server.deploy.options:ANSWERED_LOOK_S",
        "session_server.deploy.options:CLUSTER_LOOK_S",
        "session_server.deploy.options:HEALTH_PERIOD_S",
        "session_server.deploy.options:LOOK_BACK_S",
        "session_server.deploy.options:TOLD_LOOK_S",
        # Defaults of settings, which the table of settings shows.
        "session_server.runner.capacity:CPU_FRACTION",
        "session_server.runner.capacity:DEVICE_FRACTION",
    }
)
