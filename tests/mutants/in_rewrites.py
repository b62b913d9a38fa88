"""Bugs in histories that are cut, forked, edited, or compared with a whole conversation."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

CUT_KEEPS_A_TOKEN = Mutant(
    "A rewind keeps the first token of what it cuts.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.cut",
        "del self._tokens[self._answer_len :]",
        "del self._tokens[self._answer_len + 1 :]",
    ),
)

CUT_FORGETS_RAW_INPUT = Mutant(
    "A rewind to raw input goes back to the answer before it.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.cut",
        'if self._items[index].role == "raw":',
        "if index < 0:",
    ),
)

CUT_LOSES_A_QUESTION = Mutant(
    "A question that was gone back to is not there when it is to be answered.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.cut",
        "self._open = self._items.messages(first_open)",
        "self._open = ()",
    ),
)

CUT_LEAVES_ENDS_OF_ANSWERS = Mutant(
    "Answers that a rewind has cut off still count among those that a conversation agrees with.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.cut",
        "self._answers.cut(num_items)",
        "self._answers.cut(num_items + 1)",
    ),
)

REWIND_LOSES_ITS_ITEM = Mutant(
    "A rewind drops the item that it names.",
    "systematic",
    Edit(
        "session_server.sessions.edits:HistoryEdits.rewind",
        '_index_of(session, to_item, "to_item") + 1',
        '_index_of(session, to_item, "to_item")',
    ),
)

EDIT_KEEPS_WHAT_IT_REPLACES = Mutant(
    "An edited item stands behind what it was before.",
    "systematic",
    Edit(
        "session_server.sessions.edits:HistoryEdits.edit_item",
        "self._cut(session, index)",
        "self._cut(session, index + 1)",
    ),
)

HISTORY_CHANGES_UNDER_A_TURN = Mutant(
    "A conversation can be changed while a turn of it runs.",
    "systematic",
    Edit(
        "session_server.sessions.parts:SessionParts.resting",
        "if not session.is_idle:",
        "if False:",
    ),
)

FORK_SHARES_TOKENS = Mutant(
    "A fork and its source write one list of tokens.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.fork",
        "self._tokens[:], self._tools",
        "self._tokens, self._tools",
    ),
)

FORK_SHARES_ANSWERS = Mutant(
    "A fork and its source count their answers together.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.fork",
        "self._answers.copy()",
        "self._answers",
    ),
)

FORK_SHARES_ITEMS = Mutant(
    "A fork and its source write one list of items.",
    "systematic",
    Edit("session_server.sessions.transcript:Transcript.fork", "self._items.copy()", "self._items"),
)

FORK_IS_OF_ALL = Mutant(
    "A fork at an item goes on from the end.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.fork",
        "if num_items < len(self._items):",
        "if False:",
    ),
)

ONE_MORE_AGREES = Mutant(
    "A whole conversation is taken to agree with the message behind those that it repeats.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.num_agreed",
        "min(num_equal, len(chat.messages) - 1)",
        "min(num_equal + 1, len(chat.messages) - 1)",
    ),
)

ONE_MORE_STAYS = Mutant(
    "A whole conversation leaves an item behind those that it repeats.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.num_agreed",
        "return num_agreed, min(num_equal, ",
        "return num_agreed, min(num_equal + 1, ",
    ),
)

ROLES_ARE_NOT_COMPARED = Mutant(
    "A message agrees with an item of the same words, whoever has said them.",
    "systematic",
    Edit(
        "session_server.sessions.agreement:agrees",
        "item.role == message.role and item.content == message.content",
        "item.content == message.content",
    ),
)

WHOLE_IS_APPENDED = Mutant(
    "What a whole conversation replaces stays among the items.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript.commit",
        "self.cut(prompt.num_items)",
        "pass",
    ),
)

END_OF_TURN_TWICE = Mutant(
    "An answer that ended by itself is closed once more by the template.",
    "systematic",
    Edit(
        "session_server.sessions.prompt:_encode_pending",
        "return state.answer_len - drop, ids, skip",
        "return state.answer_len - drop, ids, 0 * skip",
    ),
)

END_OF_TURN_IS_LOST = Mutant(
    "An answer that was cut off is not closed before the next message.",
    "systematic",
    Edit(
        "session_server.text.chat_encoder:ChatEncoder.join",
        "if last_id == delta[leading] and",
        "if last_id == delta[leading] or",
    ),
)

KEPT_END_IS_FORGOTTEN = Mutant(
    "A whole conversation goes on from an answer as if it had been cut off.",
    "systematic",
    Edit(
        "session_server.sessions.transcript:Transcript._state_where_agreed",
        "last_id = -1 if is_cut else self._tokens[answer_len - 1]",
        "last_id = -1",
    ),
)

REWOUND_KV_IS_TRUSTED = Mutant(
    "After a rewind the server still counts on the KV of what was cut.",
    "systematic",
    Edit(
        "session_server.sessions.edits:HistoryEdits._cut",
        "set_known_len(min(known, num_kept), generation)",
        "set_known_len(known, generation)",
    ),
)
