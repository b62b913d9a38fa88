"""Run the compaction of a conversation: one turn, in which the model sums it up.

The turn runs as that of a response which is not stored: behind a response that is kept in a fork of
its session, whose beginning it shares, and canceled when its client leaves.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from session_server.core.errors import ContextLengthExceeded, SessionClosing
from session_server.core.session_events import Message, TurnCancelled, TurnFailedEntry
from session_server.protocol.compaction import (
    asking_summary,
    check_compactable,
    encode_window,
    num_summary_tokens,
    window_of,
)
from session_server.protocol.response_body import CompactionBody, ResponseBody, usage_of
from session_server.protocol.response_items import CompactionItem
from session_server.protocol.responses import CompactBody
from session_server.sessions.response_turns import ResponseTurns
from session_server.web.event_stream import until_disconnect
from session_server.web.headers import REQUEST_ID
from session_server.web.refusals import JsonResponse, failure_response
from session_server.web.requests import Call
from session_server.web.response_run import parse, start_response


async def compact(
    turns: ResponseTurns, call: Call, body: CompactBody, receive: Receive
) -> Response:
    """Sum a conversation up, and return the window that stands for it.

    Raises:
        SessionServerError: refused, or the summary does not fit behind the conversation.
        HttpRefusal: the client disconnected before.
    """
    context_len = call.services.max_context
    before: tuple[Message, ...] = ()
    goes_on_from = None
    if body.previous_response_id is not None:
        previous = await turns.previous(call.owner, body.previous_response_id, scope=None)
        before = turns.messages_before(await turns.recall(previous))
        goes_on_from = msgspec.json.decode(previous.content.body, type=ResponseBody)
    max_tokens = num_summary_tokens(context_len)
    asked = await parse(turns, call, body.summary_fields(goes_on_from, max_tokens=max_tokens))
    said = (*before, *asked.messages)
    check_compactable(said)
    summing_up = replace(asked, messages=asking_summary(asked.messages))
    run = await until_disconnect(start_response(call, turns, summing_up), receive)
    end = await run.end(receive)
    if isinstance(end, TurnFailedEntry):
        return failure_response(end)
    if isinstance(end, TurnCancelled):
        raise SessionClosing("The compaction was canceled.")
    outcome = end.outcome
    if end.reason == "length" and outcome.usage.output_tokens < max_tokens:
        text = "The context has no room for a summary behind the conversation."
        raise ContextLengthExceeded(text, param="input")
    # One that is cut before it has an answer has thoughts alone.
    summary = outcome.text or outcome.reasoning
    content = encode_window(window_of(said, summary, context_len=context_len))
    compaction = CompactionBody(
        id=asked.response_id,
        created_at=int(call.services.wall_clock_s()),
        output=(CompactionItem(id=f"cmp_{asked.body.suffix}", encrypted_content=content),),
        usage=usage_of(outcome.usage),
    )
    return JsonResponse(compaction, headers={REQUEST_ID: asked.response_id})
