"""Find out by a few renders what a chat template can do, and whether what it writes for new
messages depends on those before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from session_server.core.errors import TokenizeFailed
from session_server.core.session_events import Message, ToolCall
from session_server.text.chat_template import RenderFrame, RenderJob
from session_server.text.rendering import Rendering
from session_server.text.template_values import CallForm, conversation_of

ANSWER: Final = "zq5Answer7Stand9In3qz"
"""Stands for an answer whose tokens are known."""

ANSWERED: Final = (Message("user", "Hello."), Message("assistant", ANSWER))

_OTHERS: Final = (
    (
        Message("user", "One, two."),
        Message("assistant", "Three."),
        Message("user", "Four, five?"),
    ),
    (
        Message("user", "Six."),
        Message("assistant", "<think>\nSo seven.\n</think>\n\nSeven."),
        Message("user", "And?"),
    ),
    (Message("system", "Be brief."), Message("user", "Nine.")),
)
_ASKED: Final = (Message("user", "Ten?"),)

_TOOL_NAME: Final = "zq5_tool_3qz"
_TOOLS: Final = (
    '{"type":"function","function":{"name":"' + _TOOL_NAME + '","description":"Count letters.",'
    '"parameters":{"type":"object","properties":{"word":{"type":"string","description":"One."}},'
    '"required":["word"]}}}',
)
_ARGUMENT: Final = "zq5_word_3qz"
_CALL: Final = ToolCall("a1b2c3d4e", "zq5_called_3qz", '{"word": "' + _ARGUMENT + '"}')
"""Templates of Mistral take ids of nine letters and digits only."""

_CALLED: Final = Message("assistant", "", tool_calls=(_CALL,))
_RESULT: Final = Message("tool", "Twelve letters.", tool_call_id=_CALL.id)
_CALLING: Final = (ANSWERED[0], _CALLED, _RESULT)
_FORMS: Final = (
    CallForm(),
    CallForm(no_content=None),
    CallForm(has_objects=False),
    CallForm(no_content=None, has_objects=False),
)
_FRAME: Final = RenderFrame(datetime(2024, 7, 26, 12))


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Hold what a template can do.

    `can_append`: what a turn adds does not depend on the history before it. `can_append_tools`: the
    same holds in a conversation with tools and calls, and the tools stay where they are when it
    goes on. `takes_tools`: it writes tools. `call_form`: how it takes calls in earlier answers;
    None if it does not write them. `closing`: what it writes behind the last message of a user, up
    to where the answer begins; "" if that cannot be told.
    """

    can_append: bool = False
    can_append_tools: bool = False
    takes_tools: bool = False
    call_form: CallForm | None = None
    closing: str = ""


def find_traits() -> Rendering[TemplateTraits | str]:
    """Render a few conversations.

    Returns:
        The traits; or why not even a plain conversation can be rendered.
    """
    try:
        (asked,) = yield RenderJob.of([conversation_of(_ASKED, ())], _FRAME)
    except TokenizeFailed as error:
        return error.message
    can_append = yield from _deltas_are_equal((), _OTHERS, CallForm())
    with_tools = yield from _render(_ASKED, _TOOLS, CallForm())
    takes_tools = with_tools is not None and _TOOL_NAME in with_tools
    tools = _TOOLS if takes_tools else ()
    call_form = yield from _find_call_form(tools)
    can_append_tools = False
    if call_form is not None and can_append:
        can_append_tools = yield from _keeps_tools(tools, call_form)
    _, found, closing = asked.rpartition(_ASKED[0].content)
    closing = closing if found else ""
    return TemplateTraits(can_append, can_append_tools, takes_tools, call_form, closing)


def _find_call_form(tools: Sequence[str]) -> Rendering[CallForm | None]:
    """Return the form in which the template writes a call with its arguments; of several, that in
    which it writes least besides (an empty answer beside the call, the word "None")."""
    found: dict[int, CallForm] = {}
    for form in _FORMS:
        text = yield from _render(_CALLING, tools, form)
        if text is not None and _CALL.name in text and _ARGUMENT in text:
            found.setdefault(len(text), form)
    return found[min(found)] if found else None


def _keeps_tools(tools: Sequence[str], form: CallForm) -> Rendering[bool]:
    """Return whether a conversation with tools and calls only grows at its end."""
    asked = yield from _render((*ANSWERED, *_ASKED), tools, form)
    if asked is None or _TOOL_NAME in asked.partition(ANSWER)[2]:
        return False  # e.g. the tools stand before the last message of the user
    called_before = (*_CALLING, Message("assistant", "Twelve."), Message("user", "And?"))
    for new in ((_RESULT,), (_RESULT, _RESULT)):
        # What follows an answer with calls is found by one with a text.
        said = yield from _render((*ANSWERED, *new), tools, form)
        for history in (ANSWERED[:1], called_before):
            called = yield from _render((*history, _CALLED, *new), tools, form)
            if said is None or called is None or not called.endswith(said.partition(ANSWER)[2]):
                return False
    return (yield from _deltas_are_equal(tools, (*_OTHERS, _CALLING, called_before), form))


def _deltas_are_equal(
    tools: Sequence[str], others: Sequence[Sequence[Message]], form: CallForm
) -> Rendering[bool]:
    """Return whether different histories give the same delta."""
    expected = yield from _delta(ANSWERED[:1], tools, form)
    if expected is None:
        return False
    for history in others:
        if (yield from _render(history, tools, form)) is None:
            continue  # e.g. a template without system messages: such a history cannot occur
        if (yield from _delta(history, tools, form)) != expected:
            return False
    return True


def _delta(
    history: Sequence[Message], tools: Sequence[str], form: CallForm
) -> Rendering[str | None]:
    """Return what a new message adds behind an answer to a history; None if that cannot be told."""
    text = yield from _render((*history, ANSWERED[1], *_ASKED), tools, form)
    return text.rpartition(ANSWER)[2] if text is not None and text.count(ANSWER) == 1 else None


def _render(
    messages: Sequence[Message], tools: Sequence[str], form: CallForm
) -> Rendering[str | None]:
    """Return the text of a conversation, None if the template refuses it."""
    try:
        (text,) = yield RenderJob.of([conversation_of(messages, tools, form=form)], _FRAME)
    except TokenizeFailed:
        return None
    return text
