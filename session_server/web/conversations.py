"""Serve the conversations that clients of OpenAI's Responses keep here by name."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from session_server.core.errors import ItemNotFound
from session_server.protocol.response_body import (
    ConversationBody,
    ConversationDeleted,
    ResponseItems,
)
from session_server.protocol.response_items import (
    AnyItem,
    InputItemBody,
    messages_of,
    part_item,
    parts_of,
)
from session_server.protocol.responses import (
    ConversationCreateBody,
    ConversationItemsBody,
    ConversationUpdateBody,
)
from session_server.sessions.kept_conversations import ConversationEntry, KeptConversation
from session_server.web.openapi import answers, body_of
from session_server.web.refusals import JsonResponse
from session_server.web.requests import Call, Caller, read_body
from session_server.web.response_run import item_finder, load_references
from session_server.web.responses import (
    ItemSource,
    Page,
    item_page,
    turns_of,
)
from session_server.web.slices import encode_list

router = APIRouter(prefix="/v1/conversations", tags=["openai"])


async def _find(request: Request, call: Call, conversation_id: str) -> KeptConversation:
    return await turns_of(request).conversations.load(call.owner, conversation_id)


def _answer(request: Request, conversation: KeptConversation) -> Response:
    return JsonResponse(
        ConversationBody(
            id=conversation.key,
            created_at=conversation.created_s,
            metadata=conversation.metadata,
            durable=turns_of(request).conversations.records.is_durable(conversation),
        )
    )


def _entries(
    request: Request, call: Call, conversation_id: str, items: list[InputItemBody] | None
) -> list[ConversationEntry]:
    messages = messages_of(items, item_finder(turns_of(request), call))
    suffix = conversation_id.partition("_")[2]
    parts = parts_of(messages, f"{suffix}_{secrets.token_hex(8)}")
    return [ConversationEntry(item_id, part) for item_id, part in parts]


@router.post(
    "",
    openapi_extra=body_of(ConversationCreateBody, required=False),
    responses=answers(ConversationBody, "The conversation."),
)
async def create_conversation(request: Request, caller: Caller) -> Response:
    """Keep a conversation."""
    body = await read_body(request, ConversationCreateBody)
    await load_references(turns_of(request), caller, body.items)
    conversation = KeptConversation(
        conversation_id=f"conv_{secrets.token_hex(16)}",
        owner=caller.owner,
        created_s=int(caller.services.wall_clock_s()),
        metadata=body.metadata or {},
    )
    entries = _entries(request, caller, conversation.key, body.items)
    turns_of(request).conversations.add(conversation, entries)
    await caller.sessions.stored()
    return _answer(request, conversation)


@router.get("/{conversation_id}", responses=answers(ConversationBody, "The conversation."))
async def get_conversation(conversation_id: str, request: Request, caller: Caller) -> Response:
    """Show a conversation."""
    await caller.sessions.stored()  # what has just been added may be on its way to the disk
    return _answer(request, await _find(request, caller, conversation_id))


@router.post(
    "/{conversation_id}",
    openapi_extra=body_of(ConversationUpdateBody),
    responses=answers(ConversationBody, "The conversation."),
)
async def update_conversation(conversation_id: str, request: Request, caller: Caller) -> Response:
    """Replace the metadata of a conversation."""
    body = await read_body(request, ConversationUpdateBody)
    kept = turns_of(request).conversations
    update = partial(kept.update, metadata=body.metadata or {})
    conversation = await kept.change(caller.owner, conversation_id, update)
    return _answer(request, conversation)


@router.delete("/{conversation_id}", responses=answers(ConversationDeleted, "It is gone."))
async def delete_conversation(conversation_id: str, request: Request, caller: Caller) -> Response:
    """Forget a conversation. Responses that were made in it stay."""
    turns = turns_of(request)
    number = await turns.forget_conversation(caller.owner, conversation_id)
    await caller.sessions.stored()
    is_gone = turns.conversations.records.is_gone(number)
    return JsonResponse(ConversationDeleted(id=conversation_id, durable=is_gone))


@router.get(
    "/{conversation_id}/items", responses=answers(ResponseItems, "A page of what was said.")
)
async def list_conversation_items(
    conversation_id: str, request: Request, caller: Caller, query: Page
) -> Response:
    """List the items of a conversation, the newest first unless `order` says otherwise."""
    conversation = await _find(request, caller, conversation_id)
    if conversation.running is not None:
        await caller.sessions.stored()  # what has just been said may be on its way to the disk
    entries = conversation.entries
    source = ItemSource(len(entries), lambda index: [_item(entries[index])], entries.index_of)
    return await item_page(source, query)


@router.post(
    "/{conversation_id}/items",
    openapi_extra=body_of(ConversationItemsBody),
    responses=answers(ResponseItems, "The new items."),
)
async def create_conversation_items(
    conversation_id: str, request: Request, caller: Caller
) -> Response:
    """Append items to a conversation."""
    body = await read_body(request, ConversationItemsBody)
    await load_references(turns_of(request), caller, body.items)
    kept = turns_of(request).conversations
    await kept.load(caller.owner, conversation_id)
    entries = _entries(request, caller, conversation_id, body.items)
    await kept.change(caller.owner, conversation_id, partial(kept.append, entries=entries))
    data: Any = await encode_list(entries, _item)
    first_id, last_id = (entries[0].id, entries[-1].id) if entries else ("", "")
    return JsonResponse(
        ResponseItems(data=data, first_id=first_id, last_id=last_id, has_more=False)
    )


@router.get(
    "/{conversation_id}/items/{item_id}", responses=answers(None, "The item, as in a page.")
)
async def get_conversation_item(
    conversation_id: str, item_id: str, request: Request, caller: Caller
) -> Response:
    """Show an item."""
    entries = (await _find(request, caller, conversation_id)).entries
    index = entries.index_of(item_id)
    if index is None:
        raise ItemNotFound("There is no such item.", param="item_id")
    return JsonResponse(_item(entries[index]))


@router.delete(
    "/{conversation_id}/items/{item_id}", responses=answers(ConversationBody, "The conversation.")
)
async def delete_conversation_item(
    conversation_id: str, item_id: str, request: Request, caller: Caller
) -> Response:
    """Delete an item; the next response goes on from what stays."""
    kept = turns_of(request).conversations
    delete = partial(kept.delete_item, item_id=item_id)
    conversation = await kept.change(caller.owner, conversation_id, delete)
    return _answer(request, conversation)


def _item(entry: ConversationEntry) -> AnyItem:
    return part_item(entry.id, entry.message)
