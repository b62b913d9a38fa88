"""The bounds that are constants of the code, for docs/limits.md. Values are read, never copied."""

from __future__ import annotations

from tests.docs import pacing
from tests.docs.constant import Constant
from tests.docs.constant import constant as _constant

_400 = "refused: `invalid_request`"
_431 = "431 `headers_too_large`, and the connection is closed"
_CLOSED = "the connection is closed"
_UNUSABLE = "the model is refused: exit status 2"
_DIES = "the engine is ended and started again; running turns fail: `engine_restarting`"
_KEYS_STAY = "the server does not start; one that runs keeps the keys it has"
_PG_BREAKS = "the connection is given up, and made anew"
_STALLS = "`/ready` answers 503, `engine_stalled`, until the next step is completed"

CONNECTIONS = (
    _constant("web.http_guard:MAX_URL_BYTES", "request target", "bytes", _431),
    _constant("web.http_guard:MAX_HEADER_BYTES", "headers of a request", "bytes", _431),
    _constant("web.http_guard:MAX_HEADERS", "headers of a request", "headers", _431),
    _constant(
        "web.http_guard:HEADER_TIMEOUT_S", "time for the head of a request", "s", f"408; {_CLOSED}"
    ),
    _constant("web.tls:HANDSHAKE_TIMEOUT_S", "time for the handshake of TLS", "s", _CLOSED),
    _constant("web.tls:MAX_HANDSHAKE_BYTES", "a peer's part of that handshake", "bytes", _CLOSED),
    _constant(
        "web.tls_records:MAX_SILENT_RECORDS",
        "records of TLS that say nothing, behind that handshake",
        "records",
        _CLOSED,
    ),
    _constant(
        "web.services:WebSettings.message_timeout_s",
        "time for a request body or a frame's message",
        "s",
        "408, or close code 4408",
    ),
    _constant(
        "web.http_guard:MAX_FRAMING_PER_BODY_BYTE",
        "chunk sizes and extensions, per byte of a body",
        "bytes",
        f"400; {_CLOSED}",
    ),
    _constant(
        "web.websocket_guard:MAX_FRAGMENTS", "a message's fragments", "fragments", "close code 1009"
    ),
    _constant(
        "web.websocket_guard:MAX_CONTROL_FRAMES",
        "pings and pongs of a WebSocket at once",
        "frames",
        "close code 1008",
    ),
    _constant(
        "web.websocket_guard:CONTROL_FRAMES_PER_S",
        "pings and pongs of a WebSocket in the long run",
        "per second",
        "close code 1008",
    ),
    _constant(
        "web.listener:REQUEST_CONNECTIONS",
        "connections beside those of readers",
        "connections",
        "the one that has kept the server waiting for longest is closed, or else the new one "
        "refused: 503, `server_busy`",
    ),
    _constant(
        "web.listener:RESERVED_DESCRIPTORS",
        "descriptors that connections do not take",
        "descriptors",
        "connections are closed or refused as above",
    ),
    _constant(
        "web.http_guard:REFUSAL_LINGER_S",
        "time for a refused peer to stop sending",
        "s",
        _CLOSED,
    ),
    _constant(
        "web.services:WebSettings.auth_timeout_s",
        "time for a first message `session.auth`",
        "s",
        "close code 4401",
    ),
    _constant(
        "web.sockets:UNAUTHENTICATED_SHARE",
        "connections without a key: at most one of",
        "connections",
        "further ones are refused: 503 `server_busy`",
    ),
    _constant("web.key_file:MAX_KEYS", "keys of a file", "keys", _KEYS_STAY),
    _constant(
        "web.key_store:KEY_RANDOM_BYTES",
        "randomness of a key that `session-server keys` makes",
        "bytes",
        "there is no more",
    ),
    _constant(
        "web.key_store:MIN_PREFIX_CHARS",
        "a digest's beginning that names a key to revoke",
        "characters",
        "fewer name none",
    ),
    _constant("web.key_file:MAX_FILE_BYTES", "a file of keys", "bytes", _KEYS_STAY),
    _constant("sources:MAX_CONFIG_BYTES", "a file of settings", "bytes", "exit status 2"),
    _constant("config:MAX_URL_CHARS", "the URL of a collector", "characters", "exit status 2"),
    _constant(
        "web.key_file:MAX_LIMIT",
        "a limit of a tenant, in a line or `--tenant-limits`",
        "",
        _KEYS_STAY,
    ),
    _constant(
        "web.keys:SHARE_OF_MANY",
        "part of all sessions, turns and bytes that one of several owners may hold",
        "",
        "refused: `quota_exceeded`",
    ),
    _constant(
        "web.key_file:SHORT_KEY_CHARS",
        "an API key of a file that is long enough",
        "characters",
        "a shorter one is warned of",
    ),
    _constant(
        "web.tickets:TICKET_TTL_S",
        "time to use a ticket for a socket",
        "s",
        "refused: `unauthorized`; ask for another",
    ),
    _constant(
        "web.tickets:TICKET_RANDOM_BYTES", "randomness of a ticket", "bytes", "there is no more"
    ),
    _constant("web.tickets:TICKET_BYTES", "what an unused ticket counts", "bytes", "it is counted"),
    _constant(
        "web.tickets:MAX_OWNER_TICKET_BYTES",
        "unused tickets of one owner",
        "bytes",
        "refused: `quota_exceeded` until some are used or expire",
    ),
    _constant(
        "web.tickets:MAX_TICKET_BYTES",
        "unused tickets of all owners",
        "bytes",
        "refused: `server_busy`, or `quota_exceeded` for an owner that holds much",
    ),
    _constant("web.key_file:MAX_KEY_CHARS", "an API key", "characters", "`unauthorized`"),
    _constant("web.http_guard:STALL_S", "time in which an HTTP reader takes nothing", "s", _CLOSED),
    _constant(
        "web.services:WebSettings.send_timeout_s",
        "time in which a socket takes nothing",
        "s",
        "close code 1013; the client may resume",
    ),
    _constant(
        "web.listener:UNSENT_BYTES",
        "bytes that the kernel queues for a peer that does not read",
        "bytes",
        "the rest waits in the server",
    ),
    _constant(
        "web.connection_table:ConnectionLimits.output_bytes",
        "answers that are sent and not read, of all connections together",
        "bytes",
        "the connection that has not read for longest is closed",
    ),
    _constant(
        "web.connection_table:ConnectionLimits.output_bytes_per_address",
        "the same of one address",
        "bytes",
        "the connection that has not read for longest is closed",
    ),
    _constant(
        "web.websocket_guard:LINGER_S",
        "time for a socket to take what it is owed after its end",
        "s",
        _CLOSED,
    ),
    _constant(
        "web.services:WebSettings.ping_timeout_s", "time to answer a ping", "s", "close code 1011"
    ),
    _constant(
        "web.services:WebSettings.idle_s",
        "time in which a socket says and hears nothing",
        "s",
        "close code 4408",
    ),
    _constant("web.server:KEEP_ALIVE_S", "time between two requests", "s", _CLOSED),
    _constant(
        "web.listener:BACKLOG",
        "connections that wait to be accepted",
        "connections",
        "the kernel drops further ones",
    ),
    _constant(
        "web.drain:CLOSE_WAIT_S", "time for sockets to close in a drain", "s", "they are cut"
    ),
    _constant(
        "web.server:SHUTDOWN_S", "time for requests to end after a drain", "s", "they are cut"
    ),
    _constant("web.websocket:MAX_EPOCH_CHARS", "`epoch` of a resuming client", "characters", _400),
    _constant(
        "protocol.frame_queue:MAX_OUTBOX_FRAMES",
        "answers to frames that a client has not taken",
        "frames",
        "close code 1013",
    ),
    _constant(
        "protocol.frame_queue:MAX_OUTBOX_BYTES",
        "the same in bytes",
        "bytes",
        "the client's next frames are not read until it takes answers",
    ),
    _constant(
        "protocol.frames:MAX_COALESCED_CHARS",
        "a merged `turn.delta`",
        "characters",
        "another one begins",
    ),
)

LOGS = (
    _constant(
        "metrics.log_handler:MAX_WAITING_BYTES",
        "log lines that wait to be written",
        "bytes",
        "further ones are dropped and counted",
    ),
    _constant(
        "metrics.log_handler:MAX_REPEATS_PER_S",
        "warnings and errors of one kind in a second",
        "lines",
        "further ones are counted",
    ),
    _constant(
        "metrics.log_handler:FLUSH_TIMEOUT_S",
        "time in which the last lines are written at the end",
        "s",
        "they are lost",
    ),
    _constant(
        "metrics.logging:MAX_LINE_CHARS", "a log line", "characters", "its middle is cut out"
    ),
    _constant(
        "metrics.tracing:MAX_WAITING_TURNS",
        "ended turns and deliveries that wait for their spans",
        "",
        "further ones are not traced",
    ),
    _constant(
        "core.origin:MAX_UNDELIVERED",
        "ended turns of a request or connection whose delivery is awaited",
        "turns",
        "the trace of the oldest has no span `deliver`",
    ),
    _constant(
        "metrics.tracing:CLOSE_TIMEOUT_S",
        "time for the last traces at the end of the process",
        "s",
        "those left are not exported",
    ),
    _constant(
        "metrics.collector:MAX_ANSWER_BYTES",
        "an answer of a collector of traces",
        "bytes",
        "the rest is not read, and the connection is closed",
    ),
    _constant(
        "web.request_log:MAX_TRACE_CHARS",
        "`traceparent`, `tracestate`",
        "characters",
        "the header is ignored",
    ),
    _constant(
        "metrics.prometheus:MAX_TIMED_TURNS",
        "turns whose tokens are timed for the metrics",
        "turns",
        "those of further ones are not timed",
    ),
)

REQUESTS = (
    _constant(
        "sessions.quotas:SessionLimits.max_input_chars",
        "text of a turn or of a session's first messages, all together",
        "characters",
        _400,
    ),
    _constant(
        "sessions.quotas:SessionLimits.max_messages",
        "messages of a turn or of a session's beginning",
        "messages",
        _400,
    ),
    _constant(
        "sessions.quotas:SessionLimits.max_tools",
        "`tools` of a turn; calls of one message",
        "tools",
        _400,
    ),
    _constant(
        "text.template_values:MAX_JSON_DEPTH",
        "levels of a tool, or of the arguments of a call that a client sends",
        "levels",
        "`tokenize_failed`; arguments go to the template as text",
    ),
    _constant("sessions.quotas:SessionLimits.max_ttl_s", "`ttl_s`", "s", _400),
    _constant(
        "config:MEMORY_TTL_S",
        "idle time of a session in memory alone, without a `ttl_s` or `--session-ttl`",
        "s",
        "`session.closed` with reason `expired`",
    ),
    _constant("config:STORED_TTL_S", "the same of one in a store", "s", "the same"),
    _constant("sessions.quotas:SessionLimits.max_metadata", "`metadata`", "entries", _400),
    _constant("sessions.validation:_MAX_KEY_CHARS", "a key of `metadata`", "characters", _400),
    _constant("sessions.validation:_MAX_VALUE_CHARS", "a value of `metadata`", "characters", _400),
    _constant("sessions.quotas:SessionLimits.max_stop_strings", "`stop`", "strings", _400),
    _constant("sessions.quotas:SessionLimits.max_stop_chars", "a stop string", "characters", _400),
    _constant("sessions.validation:MAX_ID_CHARS", "an id", "characters", _400),
    _constant("web.rest:MAX_KEY_CHARS", "`Idempotency-Key`", "characters", _400),
    _constant("web.rest:MAX_PAGE", "`limit` of a list", "sessions", _400),
    _constant(
        "web.rest:MAX_PAGE_BYTES",
        "a page of a list of sessions",
        "bytes",
        "it has fewer sessions and `has_more`",
    ),
    _constant("sessions.manager:MAX_LIST", "sessions of one page of a list", "sessions", _400),
    _constant(
        "protocol.errors:MAX_MESSAGE_CHARS",
        "`message` of an error",
        "characters",
        "the rest is cut off",
    ),
    _constant(
        "protocol.errors:_MAX_SHOWN_CHARS",
        "name of a field that there is not, in such a message",
        "characters",
        "the rest is left out, and what was meant follows",
    ),
    _constant(
        "web.sglang:HEALTH_TIMEOUT_S",
        "time of `/health_generate`, which costs its caller nothing: all callers share one probe",
        "s",
        "503",
    ),
    _constant(
        "web.admin:SCRAPE_TIMEOUT_S",
        "time in which `/metrics` waits for the engine",
        "s",
        "the gauges of pools are those of before",
    ),
)

SESSIONS = (
    _constant(
        "wiring:_MAX_TURNS",
        "turns that wait or run, of all sessions and of one key",
        "turns",
        "refused: `server_busy` or `quota_exceeded`",
    ),
    _constant(
        "sessions.ended_turns:RECORD_BYTES",
        "what is kept of each ended turn while its session lives, so that it never runs again",
        "bytes",
        "counts as bytes of the conversation",
    ),
    _constant(
        "sessions.budget:RESERVED_PART",
        "part of all sessions and bytes that only keys with few of them may take",
        "",
        "refused to others: `quota_exceeded`",
    ),
    _constant(
        "sessions.budget:FEW_PART",
        "part of all sessions and bytes that counts as few",
        "",
        "no more is given from the reserve: `quota_exceeded`",
    ),
    _constant(
        "sessions.journal:JournalLimits.max_entries",
        "entries of a journal",
        "entries",
        "the oldest is dropped",
    ),
    _constant(
        "sessions.replay:OVERSIZE_GRACE_S",
        "time for which an entry larger than its journal is kept for those who read now",
        "s",
        "it is dropped",
    ),
    _constant(
        "sessions.store.imported:MAX_MADE",
        "ids that the items of a session which `sessions import` reads have had",
        "",
        "it is refused",
    ),
    _constant(
        "sessions.store.session_file:MAX_FILE_BYTES",
        "file of one session that `sessions import` reads",
        "bytes",
        "it is refused",
    ),
    _constant(
        "sessions.store.session_file:MAX_TTL_S",
        "time to live of a session that `sessions import` reads",
        "s",
        "it is refused",
    ),
    _constant(
        "session_command:_MAX_NAMED",
        "sessions that `sessions` names where an ID is not that of one",
        "sessions",
        "others are not named",
    ),
    _constant(
        "sessions.store.patience:DISK_WAIT_S",
        "time in which the disk of a store answers nothing that somebody waits for",
        "s",
        "it counts as failed: `durable` is false, and the session is written again",
    ),
    _constant(
        "sessions.store.log_frames:MAX_LOG_BYTES",
        "log of a store (`sessions.sqlite3-wal`) behind a commit",
        "bytes",
        "it is emptied into the database; while somebody reads what it has it grows until he is "
        "done",
    ),
    _constant(
        "sessions.store.deletions:MAX_RETIRED_BYTES",
        "stored sessions of one owner that are deleted and kept until the engine is told their "
        "tokens",
        "bytes",
        "further ones are deleted at once, and their KV outside of the pools ages out",
    ),
    _constant(
        "sessions.store.session_store:MAX_WAITING_BYTES",
        "entries that wait for the disk",
        "bytes",
        "a further write fails at once, and is tried again; one alone is written whatever it has",
    ),
    _constant(
        "sessions.store.session_store:CLOSE_WAIT_S",
        "time that the end of a server waits for its store",
        "s",
        "it ends without it",
    ),
    _constant(
        "sessions.store.lock:COMMANDS_WAIT_S",
        "time that a server waits for commands that have its store open",
        "s",
        "it does not start: exit status 2",
    ),
    _constant(
        "sessions.store.disk_health:QUIET_S",
        "time for which a disk that could not be read counts as failing, and between two errors of "
        "a kind in the log",
        "s",
        "it is healthy again unless a write fails",
    ),
    _constant(
        "sessions.store.disk_health:_FULL_BYTES",
        "free bytes below which an I/O error of a store is told as a full disk",
        "bytes",
        "make room, says the error",
    ),
    _constant(
        "sessions.store.connections:_BUSY_S",
        "time that a statement waits for another program that has locked the store",
        "s",
        "it fails",
    ),
    _constant(
        "sessions.postgres.connections:CONNECT_TIMEOUT_S",
        "time to connect to PostgreSQL, for each of its addresses",
        "s",
        "the read or the commit fails",
    ),
    _constant(
        "sessions.postgres.connections:UNANSWERED_TIMEOUT_S",
        "time that what was sent to PostgreSQL may stay unacknowledged",
        "s",
        _PG_BREAKS,
    ),
    _constant(
        "sessions.postgres.connections:STATEMENT_TIMEOUT_S",
        "time for one statement of PostgreSQL",
        "s",
        "it fails",
    ),
    _constant(
        "sessions.postgres.connections:ANSWER_WAIT_S",
        "time for the answer to a read of PostgreSQL",
        "s",
        _PG_BREAKS,
    ),
    _constant(
        "sessions.postgres.connections:COMMIT_WAIT_S",
        "time for a transaction of PostgreSQL with its commit",
        "s",
        _PG_BREAKS,
    ),
    _constant(
        "sessions.postgres.connections:ANSWER_TIMEOUT_S",
        "time for one answer of PostgreSQL",
        "s",
        _PG_BREAKS,
    ),
    _constant(
        "sessions.postgres.connections:LOCK_WAIT_S",
        "time that a statement waits for another transaction of PostgreSQL",
        "s",
        "it fails",
    ),
    _constant(
        "sessions.postgres.connections:IDLE_TIMEOUT_S",
        "time that a transaction of PostgreSQL may do nothing",
        "s",
        "it is undone, and others may take what its server held",
    ),
    _constant(
        "sessions.postgres.connections:MAX_READERS",
        "connections of a server that read PostgreSQL",
        "connections",
        "the next read waits",
    ),
    _constant(
        "sessions.postgres.connections:READ_WAIT_S",
        "time that a read waits for a connection to PostgreSQL",
        "s",
        "it fails",
    ),
    _constant(
        "sessions.store.writer:MAX_TRIES",
        "times that a commit is tried which PostgreSQL undoes for another one",
        "times",
        "it fails",
    ),
    _constant(
        "sessions.postgres.leases:MAX_REPLICAS",
        "replicas that share a store",
        "replicas",
        "the next one does not start",
    ),
    _constant(
        "sessions.postgres.leases:_MAX_BURIED",
        "replicas that are over and that are found in the way to one session",
        "replicas",
        "taking it fails",
    ),
    _constant(
        "sessions.store.lease:LEASE_S",
        "time that a replica may say nothing to a shared store",
        "s",
        "others take its sessions",
    ),
    _constant(
        "sessions.store.lease:MARGIN_S",
        "time before the end of its lease from which on a replica does not answer for its sessions",
        "s",
        "`session_moved`",
    ),
    _constant(
        "sessions.store.lease:READS_AT_ONCE",
        "reads of a shared store that one replica has under way",
        "reads",
        "the next one waits",
    ),
    _constant("sessions.store.lease:READ_WAIT_S", "time for one of them", "s", "`server_busy`"),
    _constant(
        "sessions.shared_sessions:HANDOVER_WAIT_S",
        "time that a request waits for the replica that holds its session",
        "s",
        "`session_moved`",
    ),
    _constant(
        "sessions.kept_conversations:MAX_CHANGES",
        "attempts of a change to a conversation that other replicas change at the same time",
        "attempts",
        "refused: `server_busy`",
    ),
    _constant(
        "sessions.shared_sessions:RECOUNT_S",
        "time for which what other replicas keep for an owner is not counted",
        "s",
        "it is counted then, and further sessions are refused",
    ),
    _constant(
        "sessions.roles.policy:MIN_SENT_TOKENS",
        "tokens to be computed from which a decode replica has another one compute a prompt",
        "tokens",
        "fewer are computed here",
    ),
    _constant(
        "sessions.roles.policy:MAX_PROMPT_TOKENS",
        "tokens of a prompt that is sent",
        "tokens",
        "a longer one is computed here",
    ),
    _constant(
        "sessions.roles.policy:MAX_SENT",
        "prompts that one replica has others compute at the same time",
        "prompts",
        "the next one is computed here",
    ),
    _constant(
        "sessions.roles.policy:MAX_SENT_TOKENS",
        "tokens of those",
        "tokens",
        "the next one is computed here",
    ),
    _constant(
        "sessions.roles.asking:WAIT_S",
        "time that a turn waits for its prompt to be computed by another replica",
        "s",
        "it is computed here",
    ),
    _constant(
        "sessions.roles.transport:SILENT_S",
        "time for which a replica that computes a prompt may say nothing",
        "s",
        "it is computed here",
    ),
    _constant(
        "sessions.roles.transport:CONNECT_S",
        "time that a connection to it may take",
        "s",
        "it is computed here",
    ),
    _constant(
        "sessions.roles.transport:MAX_LINE_BYTES",
        "bytes of a line of its answer",
        "bytes",
        "the prompt is computed here",
    ),
    _constant(
        "sessions.roles.policy:BUSY_S",
        "time for which a replica that was busy is not asked",
        "s",
        "it is asked again",
    ),
    _constant(
        "sessions.roles.policy:FAILED_S",
        "the same of one that has failed",
        "s",
        "it is asked again",
    ),
    _constant(
        "sessions.roles.policy:MISFIT_S",
        "the same of one of another model or page size",
        "s",
        "it is asked again",
    ),
    _constant(
        "sessions.roles.serving:MAX_PREFILLS",
        "prompts of others that a prefill replica computes or keeps waiting",
        "prompts",
        "the next one is refused, and computed by whoever asks",
    ),
    _constant(
        "sessions.roles.serving:MAX_PREFILL_TOKENS",
        "tokens of those, unless one alone has more",
        "tokens",
        "the next one is refused, and computed by whoever asks",
    ),
    _constant(
        "sessions.roles.serving:AT_ONCE",
        "of those, in the engine at the same time",
        "prompts",
        "the next one waits",
    ),
    _constant(
        "engine.tiers.write_through:MAX_WRITES",
        "sessions that are written to disk at once because somebody waits for it",
        "sessions",
        "of another one nothing is written",
    ),
    _constant(
        "sessions.roles.messages:FRESH_S",
        "seconds by which the time in a request between replicas may differ from the store's",
        "s",
        "it is refused: `unauthorized`",
    ),
    _constant(
        "sessions.roles.messages:MAX_SEEN",
        "requests between replicas that are remembered, so that none counts twice",
        "requests",
        "those that were made before the oldest are refused",
    ),
    _constant(
        "sessions.session_logs:PART_WAIT_S",
        "time that a session which others ask for waits for a write that fails",
        "s",
        "it is released without it",
    ),
    _constant(
        "sessions.shared_sessions:ADOPTED_AT_ONCE",
        "sessions that one replica reads at once from a shared store",
        "sessions",
        "the next one waits",
    ),
    _constant(
        "sessions.shared_sessions:MAX_ASKED",
        "sessions that others ask for, and that are to be released unread",
        "sessions",
        "others ask again",
    ),
    _constant(
        "sessions.shared_sessions:MAX_LOOKED_UP",
        "ids that were looked up in a shared store last, and are remembered",
        "ids",
        "the oldest is looked up again",
    ),
    _constant(
        "shared_store:START_WAIT_S",
        "time that a server which starts waits for a database that cannot be reached",
        "s",
        "the start fails",
    ),
    _constant(
        "sessions.postgres.schema:MIGRATION_WAIT_S",
        "time to bring the tables of PostgreSQL to a version, and to wait for who does",
        "s",
        "the server does not start",
    ),
    _constant(
        "sessions.store.examination:MAX_NAMED",
        "faults of one kind that `doctor --store` names",
        "faults",
        "the others are counted",
    ),
    _constant(
        "sessions.store.clock:JUMP_S",
        "difference of the wall clock from the time that has passed, as the store knows it, that "
        "is believed at once",
        "s",
        "logged; sessions on disk age by the time that a server runs",
    ),
    _constant(
        "sessions.store.clock:GRACE_S",
        "time for which a wall clock must be ahead by more than that, while a server runs",
        "s",
        "it is believed, and what has expired by it is deleted",
    ),
    _constant(
        "sessions.store.clock:NOTED_S",
        "time that passes at least between two notes of it in the store, each with a write that "
        "happens anyway",
        "s",
        "after a crash a start knows the time that little less well",
    ),
    _constant(
        "sessions.store.session_store:MAX_COUNTED",
        "sessions that such a clock would end, counted for the log",
        "sessions",
        "it says `at least`",
    ),
    _constant(
        "sessions.session_logs:BUSY_S",
        "time on disk of a session whose turns run, beyond its own",
        "s",
        "it is written again",
    ),
    _constant(
        "sessions.drain:_DISK_GRACE_S",
        "time that a drain waits for what it has written",
        "s",
        "it goes on",
    ),
    _constant(
        "sessions.session_logs:MAX_ENTRIES",
        "entries of a session in the store, besides those that a large one is cut into",
        "entries",
        "the next one has all of it again",
    ),
    _constant(
        "sessions.store.pieces:MAX_ENTRY_BYTES",
        "an entry of a session, unless a single item or the tools have more",
        "bytes",
        "it is cut into several, which are on disk together",
    ),
    _constant(
        "sessions.resting:MAX_RESTING",
        "sessions of Responses, and as many of Chat Completions without a name, that one key "
        "keeps at rest",
        "sessions",
        "the oldest is closed",
    ),
    _constant(
        "sessions.kept:KEPT_DIVISOR",
        "part of the bytes of conversations that responses take, and as much again for what "
        "`/v1/conversations` keeps: one of",
        "parts",
        "what was unused for longest is dropped",
    ),
    _constant(
        "web.websocket:MAX_SUBMISSIONS",
        "turns of one WebSocket whose grammar is checked or whose input is tokenized",
        "turns",
        "no further frame is read",
    ),
    _constant(
        "sessions.kept_conversations:MAX_KEPT_ITEMS",
        "items of a kept conversation (`/v1/conversations`)",
        "items",
        "further ones are refused: `quota_exceeded`",
    ),
    _constant(
        "web.responses_socket:MAX_IN_FLIGHT",
        "responses that run on one WebSocket of Responses",
        "responses",
        "further ones wait",
    ),
    _constant(
        "web.responses_socket:MAX_WAITING",
        "responses that wait on one WebSocket of Responses",
        "responses",
        "refused: `quota_exceeded`",
    ),
    _constant(
        "protocol.responses_socket:MAX_STREAMS",
        "named lanes of one WebSocket of Responses",
        "lanes",
        "refused: `websocket_stream_limit_reached`",
    ),
    _constant(
        "web.responses:MAX_ITEM_PAGE", "items in a page of a response's input", "items", _400
    ),
    _constant(
        "protocol.response_items:MAX_REFERENCED_CHARS",
        "items of one input of a response that are given by their ids, in all",
        "characters",
        _400,
    ),
    _constant(
        "protocol.compaction:MAX_SUMMARY_TOKENS",
        "summary of a compaction, thoughts included",
        "tokens",
        "it is cut",
    ),
    _constant(
        "protocol.compaction:SUMMARY_DIVISOR",
        "part of the longest context that this summary takes: one of",
        "parts",
        "it is cut; at the end of the context: `context_length_exceeded`",
    ),
    _constant(
        "protocol.compaction:MAX_SUMMARY_CHARS",
        "text of this summary",
        "characters",
        "it is cut",
    ),
    _constant(
        "protocol.compaction:MAX_KEPT_BYTES",
        "messages of the user that a compaction keeps, where the longest context has no fewer "
        "tokens than this bytes; and its first messages of the system",
        "bytes",
        "the user's older ones are summed up; longer ones of the system: `invalid_request`",
    ),
    _constant(
        "protocol.realtime_responses:MAX_ASIDES",
        "responses beside a Realtime conversation",
        "responses",
        "`error`: `too_many_responses`",
    ),
    _constant(
        "protocol.realtime_responses:MAX_WAITING_RESPONSES",
        "responses that wait behind one that a Realtime client has canceled",
        "responses",
        "`error`: `conversation_already_has_active_response`",
    ),
    _constant(
        "sessions.quotas:MAX_SPARED",
        "sessions without a name that close to make room for one session or turn",
        "sessions",
        "what there is no room for is refused: `quota_exceeded`, `server_busy`",
    ),
    _constant(
        "sessions.quotas:MAX_UNLOADED",
        "sessions at rest that leave the memory, and stay in the store, to make room for one "
        "session or turn",
        "sessions",
        "what there is no room for is refused: `quota_exceeded`, `server_busy`",
    ),
    _constant(
        "wiring:STORE_FACTOR",
        "bytes of sessions in a store, for each of `--session-memory-bytes`",
        "bytes",
        "further stored sessions and their turns are refused: `server_busy`, or `quota_exceeded` "
        "if the API key holds its share",
    ),
    _constant(
        "sessions.session_logs:EXPIRY_SLACK_S",
        "difference between the end of a session's time in memory and in the store",
        "s",
        "it is written before the session leaves the memory",
    ),
    _constant(
        "web.readers:MAX_SESSION_READERS",
        "event streams and waiting HTTP turns of one session, beside one for each turn",
        "readers",
        "refused: 503, `server_busy`",
    ),
    _constant(
        "web.readers:MAX_BOUND_TURNS",
        "turns of one session that end with their readers",
        "turns",
        "the oldest is no longer bound",
    ),
    _constant(
        "sessions.quotas:SessionLimits.inline_input_chars",
        "input that is tokenized on the event loop",
        "characters",
        "a longer one gets a thread of its own",
    ),
    _constant(
        "sessions.quotas:SessionLimits.tokenize_deadline_s",
        "time to tokenize an input",
        "s",
        "`tokenize_failed`",
    ),
    _constant(
        "sessions.quotas:SessionLimits.tokenize_wait_s",
        "time an input waits for others to be tokenized; owners take turns",
        "s",
        "`server_busy`",
    ),
    _constant(
        "sessions.tokenizing:MAX_THREADS",
        "threads that tokenize, stuck ones included",
        "threads",
        "`server_busy`",
    ),
    _constant(
        "sessions.request_tree:MAX_NODES",
        "requests of one branching session",
        "requests",
        "refused: `quota_exceeded`",
    ),
    _constant(
        "sessions.engine_link:ANSWER_DEADLINE_S",
        "time for the engine to report memory or to flush",
        "s",
        "`engine_unavailable`",
    ),
    _constant(
        "sessions.engine_link:STALLED_ANSWER_DEADLINE_S",
        "answer of an engine that completes no step",
        "s",
        "`engine_unavailable`",
    ),
    _constant(
        "sessions.drain:_CANCEL_GRACE_S",
        "time for the engine to confirm the last cancels of a drain",
        "s",
        "the turns end without it",
    ),
    _constant(
        "text.detokenizer:MAX_HELD_TOKENS",
        "tokens that wait for the rest of a character",
        "tokens",
        "they are given out as U+FFFD",
    ),
    _constant(
        "text.answer_calls:MAX_NAME_CHARS",
        "name of a function or parameter that an answer calls",
        "characters",
        "the call is text",
    ),
    _constant(
        "text.answer_literals:MAX_DEPTH",
        "lists and objects in each other, in the arguments of a call",
        "",
        "the arguments end there, the rest is text",
    ),
    _constant(
        "text.answer_literals:MAX_SCALAR_CHARS",
        "a number in the arguments of a call",
        "characters",
        "the arguments end there, the rest is text",
    ),
)

CHECKPOINTS = (
    _constant(
        "models.files:MAX_CONFIG_BYTES",
        "`config.json`, `generation_config.json`, a chat template",
        "bytes",
        _UNUSABLE,
    ),
    _constant(
        "models.files:MAX_JSON_BYTES",
        "`tokenizer_config.json`, the index of the weights",
        "bytes",
        f"{_UNUSABLE} (1 where only the engine reads the file)",
    ),
    _constant("models.files:MAX_TOKENIZER_BYTES", "`tokenizer.json`", "bytes", _UNUSABLE),
    _constant(
        "models.gguf.reader:MAX_HEADER_BYTES",
        "header of a GGUF file, and its texts and lists in memory",
        "bytes",
        _UNUSABLE,
    ),
    _constant("models.gguf.reader:MAX_PAIRS", "metadata keys in it", "keys", _UNUSABLE),
    _constant("models.gguf.reader:MAX_TENSORS", "tensors in it", "tensors", _UNUSABLE),
    _constant("models.gguf.reader:MAX_DIMENSIONS", "dimensions of one", "dimensions", _UNUSABLE),
    _constant("models.gguf.reader:MAX_ARRAY_LEN", "a list in it", "elements", _UNUSABLE),
    _constant("models.gguf.reader:MAX_STRING_BYTES", "a text in it", "bytes", _UNUSABLE),
    _constant("models.gguf.reader:MAX_ALIGNMENT", "alignment of its tensors", "bytes", _UNUSABLE),
    _constant("text.gguf_tokenizer:MAX_TOKEN_CHARS", "a token in it", "characters", _UNUSABLE),
    _constant(
        "text.gguf_tokenizer:MAX_ADDED_TOKENS",
        "control and user-defined tokens in it",
        "tokens",
        _UNUSABLE,
    ),
    _constant(
        "text.gguf_tokenizer:MAX_MERGE_CHARS",
        "merges that follow from the scores of its tokens",
        "characters",
        _UNUSABLE,
    ),
    _constant(
        "models.checkpoint_files:MAX_THREADS",
        "threads that hash a model whose KV goes to disk, one for each processor",
        "threads",
        "the rest of its files waits for them",
    ),
    _constant(
        "models.hub:_MAX_LISTED", "GGUF files that an error names", "files", "the rest is left out"
    ),
    _constant(
        "models.quantization:_MAX_GROUP_SIZE",
        "inputs that share a scale, unless all do",
        "inputs",
        _UNUSABLE,
    ),
    _constant("models.bounds:MAX_LAYERS", "layers", "layers", _UNUSABLE),
    _constant("models.bounds:MAX_HEADS", "heads of one kind", "heads", _UNUSABLE),
    _constant("models.bounds:MAX_HEAD_DIM", "elements of a head", "elements", _UNUSABLE),
    _constant(
        "models.bounds:MAX_SIZE",
        "elements of a hidden state, a feed-forward or a latent",
        "elements",
        _UNUSABLE,
    ),
    _constant("models.bounds:MAX_CONTEXT_LEN", "context of a model", "tokens", _UNUSABLE),
    _constant("models.bounds:MAX_VOCAB_SIZE", "vocabulary of a model", "tokens", _UNUSABLE),
    _constant("models.bounds:MAX_EXPERTS", "experts of a layer", "experts", _UNUSABLE),
    _constant("models.bounds:MAX_EXPERTS_IN_ALL", "experts of a model", "experts", _UNUSABLE),
    _constant("models.bounds:MAX_CONV_WIDTH", "width of a convolution", "tokens", _UNUSABLE),
    _constant(
        "models.errors:MAX_SHOWN_CHARS",
        "a value that an error quotes",
        "characters",
        "the rest is cut off",
    ),
    _constant(
        "text.template_worker:RenderLimits.cpu_s",
        "processor time of rendering a turn's messages",
        "s",
        "`tokenize_failed`; the renderer is started again",
    ),
    _constant(
        "text.template_worker:RenderLimits.deadline_s",
        "time of rendering a turn's messages",
        "s",
        "`server_busy`: the renderer was stopped, and is started again",
    ),
    _constant(
        "text.template_worker:RenderLimits.memory_bytes",
        "address space of the process that renders",
        "bytes",
        "`tokenize_failed`",
    ),
    _constant(
        "core.sampling:MAX_GRAMMAR_BYTES",
        "the text of a JSON schema, a regular expression or a grammar",
        "bytes",
        "`invalid_request`",
    ),
    _constant(
        "core.grammar:MAX_GRAMMAR_SYMBOLS",
        "symbols of a compiled grammar",
        "symbols",
        "`invalid_request`",
    ),
    _constant(
        "core.grammar:MAX_LEXER_STATES",
        "states of the lexer of one answer that is held to a grammar",
        "states",
        "the turn fails: `grammar_failed`",
    ),
    _constant(
        "core.grammar:STEP_LEXER_FUEL",
        "work of that lexer for one token",
        "units of its fuel, 14,000 to a millisecond",
        "the turn fails: `grammar_failed`",
    ),
    _constant(
        "core.grammar:STEP_MAX_ITEMS",
        "items that the parser of a grammar adds for one token",
        "items",
        "the turn fails: `grammar_failed`",
    ),
    _constant(
        "core.grammar:_MAX_REASON_CHARS",
        "why a grammar is refused, in an error",
        "characters",
        "the rest is cut off",
    ),
    _constant(
        "text.grammar_worker:CheckLimits.cpu_s",
        "processor time of checking a turn's grammar",
        "s",
        "`invalid_request`; the process that checks is started again",
    ),
    _constant(
        "text.grammar_worker:CheckLimits.deadline_s",
        "time of checking a turn's grammar",
        "s",
        "`server_busy`: the process that checks was stopped, and is started again",
    ),
    _constant(
        "text.grammar_worker:CheckLimits.memory_bytes",
        "address space of the process that checks grammars",
        "bytes",
        "`invalid_request`; the process that checks is started again",
    ),
    _constant(
        "text.grammar_worker:MAX_KNOWN",
        "grammars that need not be checked again",
        "grammars",
        "the one used longest ago is checked again",
    ),
    _constant(
        "text.grammar_worker:MAX_ANSWER_BYTES",
        "what that process may say about a grammar",
        "bytes",
        "`invalid_request`",
    ),
    _constant(
        "runner.grammar_cache:MAX_CACHED_BYTES",
        "compiled grammars kept for later turns, estimated from their texts",
        "bytes",
        "those used longest ago go; they are compiled again when they are needed",
    ),
    _constant(
        "engine.scheduler:COMPILED_PER_RUNNING",
        "turns whose grammar is kept compiled, for each turn that may run",
        "turns",
        "others wait until one of these ends",
    ),
    _constant(
        "engine_host.compiling:NUM_THREADS",
        "grammars that the engine compiles at the same time",
        "grammars",
        "others wait",
    ),
    _constant(
        "text.worker_child:COMPILE_CPU_S",
        "processor time of compiling a template, or of reading a vocabulary for grammars",
        "s",
        _UNUSABLE,
    ),
    _constant(
        "text.worker_process:START_TIMEOUT_S",
        "time for the process that renders, or checks grammars, to start",
        "s",
        _UNUSABLE,
    ),
    _constant(
        "text.chat_template:MAX_RENDER_CHARS",
        "text that a chat template writes",
        "characters",
        "`tokenize_failed`",
    ),
    _constant(
        "text.chat_template:_MAX_MESSAGE_CHARS",
        "words of a template that refuses",
        "characters",
        "the rest is cut off",
    ),
    _constant(
        "runner.checkpoint:MAX_NAMED_TENSORS",
        "tensors that an error names",
        "tensors",
        "the rest is counted",
    ),
    _constant(
        "runner.checkpoint:MAX_MAPPED_BYTES",
        "a mapping that weights are read from",
        "bytes",
        "it is given up for a new one",
    ),
)

ENGINE = (
    _constant(
        "kv_tiers:_FREE_DIVISOR",
        "free host memory that copies of KV take at the start: at most one part of",
        "parts",
        "they take that much",
    ),
    _constant(
        "kv_tiers:_STAGING_BYTES",
        "host memory that what is written to disk passes through, where `--host-kv-bytes` is less",
        "bytes",
        "what was used longest ago leaves it once it is written",
    ),
    _constant(
        "engine.tiers.store:_FULL_DIVISOR",
        "free part of that memory: one of",
        "parts",
        "where less is free, copies are written to disk ahead of need",
    ),
    _constant(
        "engine.tiers.store:MAX_INDEX_BYTES",
        "host memory for what is known of files of KV: their names, and the tokens of those read",
        "bytes",
        "the files of whoever has most give way, those used longest ago first",
    ),
    _constant(
        "engine.tiers.forgetting:MAX_FORGOTTEN_TOKENS",
        "histories of deleted sessions whose KV is not dropped yet",
        "tokens",
        "a step drops that of the first ones, however long it takes",
    ),
    _constant(
        "engine.tiers.disk_watch:DISK_WAIT_S",
        "silence of the disk that KV is read from, and what its bytes take at 100 MiB/s",
        "s",
        "turns compute, and nothing is read of it until it answers",
    ),
    _constant(
        "runner.kv_directory:RESERVE_BYTES",
        "free bytes that files of KV leave to the log on their disk",
        "bytes",
        "a file is not written, and those of whoever has most give way until they are free again",
    ),
    _constant(
        "runner.kv_directory:RESERVE_DIVISOR",
        "the same on a small disk: one part of",
        "parts",
        "the same",
    ),
    _constant(
        "engine.tiers.room_watch:ROOM_INTERVAL_S",
        "time between two looks at what a disk of KV has free",
        "s",
        "files that have to give way do so that much later",
    ),
    _constant(
        "engine.tiers.disk_account:_QUOTA_DIVISOR",
        "files of KV where the disk refuses one and shows no want of room: one part gives way of",
        "parts",
        "a part of the rest gives way with the next one that is refused",
    ),
    _constant(
        "engine.tiers.disk_account:QUOTA_HOLD_S",
        "time for which they take no more than what is left then",
        "s",
        "they may take more again, until one is refused",
    ),
    _constant(
        "runner.segment_format:MAX_FILE_BYTES",
        "file of KV",
        "bytes",
        "it is not written; one that is there is refused before it is read",
    ),
    _constant(
        "runner.segment_format:MAX_HEADER_BYTES",
        "header of a file of KV",
        "bytes",
        "the file is refused before it is read",
    ),
    _constant(
        "runner.segment_files:_MAX_REFUSED",
        "files of KV that did not verify and are kept, beside `--disk-kv-bytes`",
        "files",
        "the one that was put aside longest ago is removed",
    ),
    _constant(
        "runner.shared_directory:UNUSED_S",
        "silence of a server after which its shared files of KV are nobody's",
        "s",
        "files of a layout that no other uses are removed, and so is one that was being written",
    ),
    _constant(
        "runner.shared_directory:HEARTBEAT_S",
        "time between two signs of life in a shared directory of KV",
        "s",
        "another one is given",
    ),
    _constant(
        "runner.shared_directory:WALK_S",
        "time between two looks at all of a shared directory of KV",
        "s",
        "another look begins",
    ),
    _constant(
        "runner.shared_directory:SLICE_S",
        "such a look, while reads and writes wait",
        "s",
        "it goes on 2 s later",
    ),
    _constant(
        "runner.shared_directory:SPARE_DIVISOR",
        "bytes that are free once shared files had to go: one part of",
        "parts",
        "the next file that has no room has others go",
    ),
    _constant(
        "runner.shared_directory:MAX_OLDEST",
        "shared files of KV that are remembered as those to go first",
        "files",
        "further ones are found by the next look",
    ),
    _constant(
        "runner.shared_directory:_TRIES",
        "tries to make a shared directory that others remove",
        "tries",
        "the server does not start: exit status 2",
    ),
    _constant(
        "runner.shared_writers:LOOKED_AT",
        "servers whose files a look at what all have written to a shared directory reads again",
        "files",
        "the next look reads the others",
    ),
    _constant(
        "runner.shared_writers:_SETTLED_NS",
        "time after which a change of a shared directory of KV shows in its time",
        "ns",
        "its names are not read again before the next change",
    ),
    _constant(
        "runner.own_files:MAX_WRITTEN",
        "shared files of KV that a server remembers as its own",
        "files",
        "where what it has written may be wrong, files go that others have used since it began",
    ),
    _constant(
        "engine.tiers.shared_index:ASK_AGAIN_S",
        "time for which a shared file that was not there is not looked for",
        "s",
        "it is looked for again",
    ),
    _constant(
        "engine.tiers.shared_index:MAX_ASKED",
        "names of such files",
        "names",
        "the one that was looked for longest ago may be again",
    ),
    _constant(
        "engine.tiers.erasing:BATCH_TOKENS",
        "histories whose files are looked for in a shared directory at the same time",
        "tokens",
        "the others come next; a longer one is looked for alone",
    ),
    _constant(
        "engine.tiers.erasing:MAX_LEFT_TOKENS",
        "deleted histories that wait for that",
        "tokens",
        "a further one is asked for again where it is stored, and else ages out",
    ),
    _constant(
        "engine.tiers.handovers:HANDOVER_S",
        "time for which a session that moves waits for its KV to be written",
        "s",
        "it is released, and what is missing is computed",
    ),
    _constant(
        "sessions.engine_copies:KV_WAIT_S",
        "the same where the engine does not answer",
        "s",
        "it is released",
    ),
    _constant(
        "engine.tiers.spilling:REST_S",
        "rest of a session where files of KV are shared",
        "s",
        "its KV is written",
    ),
    _constant(
        "engine.tiers.spilling:MAX_COPIES",
        "sessions that are copied out of the pools at the same time",
        "sessions",
        "further ones wait, and are not cooled before",
    ),
    _constant(
        "engine.tiers.spilling:_DIRTY_DIVISOR",
        "pages of sessions at rest that were not copied: one part of",
        "parts",
        "they are copied ahead of need",
    ),
    _constant(
        "engine.tiers.spilling:_MAX_TRIES",
        "tries to copy a session that find no more room outside of the pools than those before",
        "tries",
        "what was not copied is computed again",
    ),
    _constant(
        "engine.tiers.restoring:_AHEAD_DIVISOR",
        "pages that sessions are copied back into before their turns are admitted: one part of",
        "parts",
        "further ones are copied back when their turns are admitted",
    ),
    _constant(
        "engine.tiers.restoring:_PLANNED_DIVISOR",
        "pages that sessions are copied back into and no turn has used yet: one part of",
        "parts",
        "further ones are copied back once turns have used those before them",
    ),
    _constant(
        "engine_host.process:MAX_UNSENT_BYTES",
        "commands that the engine has not read",
        "bytes",
        "`engine_unavailable`",
    ),
    _constant(
        "engine_host.transport:MAX_FRAME_BYTES",
        "one command or event between the processes",
        "bytes",
        _DIES,
    ),
    _constant(
        "engine_host.transport:MAX_EVENTS_BYTES",
        "events of one step that the server decodes at a time",
        "bytes",
        "the rest comes in further frames",
    ),
    _constant(
        "engine_host.inbox:MAX_INBOX_BYTES",
        "memory of commands that wait for the next step",
        "bytes",
        "the engine reads no more; the server keeps them",
    ),
    _constant(
        "engine_host.loop:MAX_BYTES_PER_STEP",
        "memory of the commands of one step",
        "bytes",
        "the rest comes with the next step",
    ),
    _constant(
        "engine_host.loop:MAX_ITEMS_PER_STEP",
        "commands and results of one step",
        "items",
        "the rest comes with the next step",
    ),
    _constant(
        "engine_host.progress:STEP_LIMIT_S",
        "one step, or four times the slowest recent one of its size if that is more",
        "s",
        _STALLS,
    ),
    _constant("engine_host.progress:FIRST_FORWARD_LIMIT_S", "the first forward", "s", _STALLS),
    _constant(
        "engine_host.progress:RECOUNT_LIMIT_S",
        "a step that recounts all memory on demand",
        "s",
        _STALLS,
    ),
    _constant(
        "engine_host.watchdog:SILENCE_LIMIT_S",
        "time in which nothing is heard of the engine's process",
        "s",
        _STALLS,
    ),
    _constant(
        "engine_host.watchdog:HANG_LIMIT_S", "time in which no turn is told anything", "s", _DIES
    ),
    _constant(
        "engine_host.process:DEATH_PATIENCE_S",
        "time for an engine that let go of its socket to end",
        "s",
        "it is killed",
    ),
    _constant(
        "engine_host.child:ORPHAN_GRACE_S",
        "time for an engine to end once the server is gone",
        "s",
        "it ends at once",
    ),
    _constant(
        "parallel.group:COLLECTIVE_TIMEOUT_S",
        "time that a rank waits for the others in a forward",
        "s",
        _DIES,
    ),
    _constant(
        "parallel.ranks:START_TIMEOUT_S",
        "time for the process of a rank to start",
        "s",
        "a start that did not succeed; one of a server ends with status 2",
    ),
    _constant(
        "parallel.ranks:EXIT_PATIENCE_S",
        "time for ranks to end",
        "s",
        "those that are left are killed",
    ),
    _constant(
        "core.engine_client:STOP_TIMEOUT_S",
        "time for the last forwards of an engine that stops; with KV on disk, --drain-timeout more",
        "s",
        "it is ended",
    ),
    _constant(
        "engine.plan_admission:MAX_BYPASSES",
        "shorter turns, and turns of others, that bypass one that waits for pages",
        "turns",
        "none bypasses it any more",
    ),
    _constant(
        "engine.plan_admission:KEPT_PLACES",
        "places of turns kept for owners that have few, where there are several: one of",
        "places",
        "further turns of an owner that has many wait",
    ),
    _constant(
        "engine.tenant_lines:CREDIT_TOKENS",
        "how far an owner that asks for little may be behind others, and comes first",
        "tokens",
        "what it was away for longer does not count",
    ),
    _constant(
        "engine.tenant_lines:MAX_SERVED_TENANTS",
        "owners of whom it is remembered what they were served",
        "owners",
        "those that were served least are forgotten, and count as served as little as counts",
    ),
    _constant(
        "engine.tenant_lines:PRIORITY_TOKENS",
        "a level of priority between owners",
        "tokens",
        "an owner that was served so much more comes after others",
    ),
    _constant(
        "engine.scheduler_view:FLOOD_FORWARDS",
        "forwards that owners fill beyond a share before they are a flood, where there are several",
        "forwards",
        "all owners that are not behind have two shares of a forward together",
    ),
    _constant(
        "engine.shares:FLOOD_SHARES",
        "shares of a forward in a flood, while no owner is behind",
        "shares",
        "nobody waits longer than for such a forward",
    ),
    _constant(
        "engine.plan_tokens:LAG_FORWARDS",
        "full forwards by which an owner is behind to have all of the next in a flood",
        "forwards",
        "an owner that is less behind is one of the flood",
    ),
    _constant(
        "engine.shares:MAX_SHARES",
        "long inputs that share one forward",
        "turns",
        "the others have what these leave",
    ),
    _constant(
        "engine.input_drafts:MAX_DRAFT_ROWS",
        "sessions whose drafts of input share one forward",
        "sessions",
        "the next forward has those of others",
    ),
    _constant(
        "engine.config:MAX_DRAFTS", "drafts of a turn in one forward", "tokens", "exit status 2"
    ),
    _constant(
        "engine.ngram:MAX_MATCH",
        "tokens that a draft from the text is matched by",
        "tokens",
        "longer matches count alike",
    ),
    _constant("engine.guard:MAX_REBUILDS", "rebuilds of wrong page accounts", "times", _DIES),
    _constant(
        "engine_host.audit_pace:MAX_AUDIT_DELAY_S",
        "work without rest before memory is recounted",
        "s",
        "the recount begins, in slices between steps",
    ),
    _constant(
        "engine.memory:MAX_REMEMBERED",
        "violations that a report quotes",
        "texts",
        "the oldest is dropped; the count goes on",
    ),
    _constant(
        "core.commands:MAX_REPORTED_SESSIONS",
        "sessions that a memory report lists",
        "sessions",
        "the rest is counted",
    ),
    _constant(
        "core.commands:MAX_REPORTED_STEPS",
        "engine steps that a memory report tells of",
        "steps",
        "older ones are left out",
    ),
    _constant(
        "core.commands:MAX_REPORTED_ROWS",
        "rows of those steps",
        "rows",
        "older steps are left out",
    ),
    _constant(
        "web.server_watch:MAX_LISTENERS",
        "readers of `GET /v1/admin/events`",
        "readers",
        "refused: `server_busy`",
    ),
    _constant(
        "web.server_watch:SAMPLE_TIMEOUT_S",
        "time for the accounts of a sample",
        "s",
        "`memory` is null in that sample",
    ),
    _constant(
        "web.admin_sessions:MAX_ADMIN_PAGE",
        "sessions in a page of `GET /v1/admin/sessions`",
        "sessions",
        _400,
    ),
    _constant(
        "web.admin_sessions:MAX_MATCH_CHARS",
        "`match` of `GET /v1/admin/sessions`",
        "characters",
        _400,
    ),
    _constant(
        "web.admin_sessions:REPORT_TIMEOUT_S",
        "time for what the engine says of such a page",
        "s",
        "`pages` and `kv_bytes` are null",
    ),
    Constant(
        "cache.content:MAX_SKIPPED",
        "sessions that one choice of a page to look at passes over",
        "sessions",
        "no page is looked at this time",
    ),
    Constant(
        "cache.pair_check:MAX_SETTLED_STATES",
        "settled states of a running turn",
        "states",
        "a violation: see memory.md",
    ),
)

_REPLACED = "the replica is replaced, and its sessions end"

REPLICAS = (
    _constant("deploy.options:MAX_REPLICAS", "replicas of a cluster", "replicas", "exit status 2"),
    _constant(
        "deploy.options:REQUESTS_BESIDE",
        "requests of a replica beside its connections",
        "requests",
        "another replica is asked",
    ),
    _constant(
        "deploy.routing:MAX_KEY_CHARS",
        "characters of what a request is routed by",
        "characters",
        "the rest does not count",
    ),
    _constant(
        "deploy.options:HEALTH_TIMEOUT_S",
        "time for a replica to say that it is healthy",
        "s",
        f"three times in a row: {_REPLACED}",
    ),
    _constant("deploy.options:UNREADY_LIMIT_S", "time without an engine", "s", _REPLACED),
    _constant(
        "deploy.options:STALLED_LIMIT_S", "time without a step of the engine", "s", _REPLACED
    ),
    _constant(
        "deploy.options:LAST_ANSWERS_S",
        "time for requests to end once a drain is over",
        "s",
        "they are ended",
    ),
    _constant(
        "deploy.options:STOP_MARGIN_S",
        "time for a replica to stop, beside the drain and the engine",
        "s",
        "its process is killed",
    ),
    _constant(
        "deploy.options:REPORT_DEADLINE_S",
        "time for a replica to say what it does",
        "s",
        "`cluster status` shows no answer",
    ),
    _constant(
        "deploy.options:MEMORY_DEADLINE_S",
        "time for an engine to say how full KV is",
        "s",
        "it counts as empty",
    ),
    _constant(
        "deploy.autoscaling:TARGET_TURNS",
        "turns per replica, as a share of `--max-running-requests`",
        "",
        "a range of replicas grows",
    ),
    _constant(
        "deploy.autoscaling:TARGET_KV_USE",
        "KV that is held, as a share",
        "",
        "a range of replicas grows",
    ),
    _constant(
        "deploy.options:UPSCALE_DELAY_S", "time above either before it grows", "s", "it grows"
    ),
    _constant("deploy.options:DOWNSCALE_DELAY_S", "time below both", "s", "it shrinks"),
    _constant("deploy.head:CONNECT_TIMEOUT_S", "time for a Ray to answer", "s", "exit status 1"),
    _constant("deploy.head:START_TIMEOUT_S", "time for a Ray to start", "s", "exit status 1"),
    _constant(
        "deploy.head:STOP_TIMEOUT_S", "time for a Ray of our own to end", "s", "it is killed"
    ),
)

FORWARD = (
    _constant(
        "attention.cpu:MAX_PADDED_BYTES",
        "K and V of a row that joins a padded batch",
        "bytes",
        "the row gets a kernel call of its own",
    ),
    _constant(
        "attention.cpu:MAX_CAST_BYTES",
        "K and V that are cast at a time",
        "bytes",
        "the rest is cast next",
    ),
    _constant(
        "attention.cpu:MAX_FOLDED_TOKENS",
        "tokens that are folded into the heads",
        "tokens",
        "longer ones are computed unfolded",
    ),
)

GROUPS: dict[str, tuple[Constant, ...]] = {
    "Connections": CONNECTIONS,
    "Requests": REQUESTS,
    "Sessions and turns": SESSIONS,
    "Checkpoints": CHECKPOINTS,
    "The engine": ENGINE,
    "Replicas": REPLICAS,
    "Logs": LOGS,
    "Done at a time (no answer depends on these)": pacing.SLICES,
    "Kept for reading (no answer depends on these)": pacing.RECORDS,
    "Inside a forward (no answer depends on these)": FORWARD,
}
