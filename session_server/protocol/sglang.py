"""Translate SGLang's session API: its bodies to ours, and our answers to its own.

Names, shapes, status codes and error messages are those that clients of SGLang 0.5 rely on: unknown
keys are ignored, `max_new_tokens` beyond the room left is clipped, an aborted turn rolls its
session back and answers 200 with a `finish_reason` of type `abort`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, field

from session_server.core.errors import InvalidRequest, UnsupportedOperation
from session_server.core.sampling import MAX_OUTPUT_TOKENS, SamplingParams
from session_server.core.session_events import (
    TextInput,
    TokenInput,
    TurnRequest,
)
from session_server.protocol.grammars import GrammarText
from session_server.protocol.messages import (
    MAX_CONTENT_CHARS,
    MAX_STOP_STRINGS,
    MAX_TTL_S,
    Fraction,
    LogitBias,
    NumTokens,
    Penalty,
    Priority,
    SamplingBody,
    Seed,
    StopString,
    StopTokenIds,
    Temperature,
    TokenIds,
    TopK,
    TopLogprobs,
    TopP,
    sampling_params,
    text_options,
)

DEFAULT_MAX_NEW_TOKENS: Final = 128
MAX_RID_CHARS: Final = 256
_DEFAULTS: Final = SamplingParams(max_tokens=DEFAULT_MAX_NEW_TOKENS)

Rid = Annotated[str, Meta(max_length=MAX_RID_CHARS)]


class OpenSessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/open_session`. `timeout`: idle seconds; `capacity_of_str_len` is accepted and
    has no meaning here, since a session's history is bounded by the context.
    """

    capacity_of_str_len: Annotated[int, Meta(ge=0, le=1 << 53)] | None = None
    session_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:\-]{1,64}$(?!\n)")] | None = None
    streaming: bool | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TTL_S)] | None = None


class CloseSessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/close_session`."""

    session_id: Rid


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/abort_request`. The rid must match exactly; a prefix does not match."""

    rid: Rid | None = None
    abort_all: bool | None = None


class SessionParamsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The session that a request appends to and, for non-streaming sessions, where."""

    id: Rid | None = None
    rid: Rid | None = None
    offset: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class GenerateSampling(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's sampling names on the wire, `SamplingBody`'s here."""

    max_tokens: Annotated[int, Meta(ge=0, le=1 << 53)] | None = field(
        default=None, name="max_new_tokens"
    )
    min_tokens: NumTokens | None = field(default=None, name="min_new_tokens")
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: StopTokenIds | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=2.0)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    keep_stop: bool | None = field(default=None, name="no_stop_trim")
    n: Annotated[int, Meta(ge=1, le=1)] | None = None
    seed: Seed | None = field(default=None, name="sampling_seed")
    logit_bias: LogitBias | None = None
    json_schema: GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: Any = None
    structural_tag: Any = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/generate`: one request; lists of inputs are rejected with a clear message."""

    text: Annotated[str, Meta(max_length=MAX_CONTENT_CHARS)] | list[Any] | None = None
    input_ids: list[Any] | None = None
    input_embeds: list[Any] | None = None
    image_data: Any = None
    sampling_params: GenerateSampling | list[Any] | None = None
    rid: Rid | list[Any] | None = None
    return_logprob: bool | list[Any] | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    top_logprobs_num: TopLogprobs | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    session_params: SessionParamsBody | None = None
    session_id: Rid | None = None
    priority: Priority | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """Hold one decoded `/generate` request. `session` is None for a completion without one."""

    rid: str
    request: TurnRequest
    session: SessionParamsBody | None
    stream: bool
    return_logprob: bool
    text_in_logprobs: bool


def parse_generation(body: GenerateBody, *, rid: str, turn_id: str) -> Generation:
    """Translate a `/generate` request.

    Args:
        body: as received.
        rid: name of the request in answers and aborts.
        turn_id: the turn's id here; a client may use one rid for many requests.

    Raises:
        InvalidRequest: it asks for what makes no sense or is not offered.
    """
    _reject_batches(body)
    session = _session_params(body)
    sampling = _sampling(body)
    request = TurnRequest(
        turn_id=turn_id,
        input=_input(body),
        sampling=sampling_params(sampling, defaults=_DEFAULTS),
        text=text_options(sampling),
        priority=body.priority or 0,
        queue=False,
        on_disconnect="cancel",
    )
    return Generation(
        rid=rid,
        request=request,
        session=session,
        stream=bool(body.stream),
        return_logprob=bool(body.return_logprob),
        text_in_logprobs=bool(body.return_text_in_logprobs),
    )


def _reject_batches(body: GenerateBody) -> None:
    fields = ("text", "sampling_params", "rid", "return_logprob")
    for name in fields:
        if isinstance(getattr(body, name), list):
            raise UnsupportedOperation(
                f"A list of {name} (a batch) is not supported; send one request each.", param=name
            )
    if body.input_ids and isinstance(body.input_ids[0], list):
        raise UnsupportedOperation(
            "A list of input_ids (a batch) is not supported; send one request each.",
            param="input_ids",
        )
    for name in ("input_embeds", "image_data", "token_ids_logprob"):
        if getattr(body, name):
            raise UnsupportedOperation(f"{name} is not supported.", param=name)


def _session_params(body: GenerateBody) -> SessionParamsBody | None:
    if body.session_id is not None and body.session_params is not None:
        raise InvalidRequest(
            "session_id and session_params cannot both be set.", param="session_params"
        )
    if body.session_id is not None:
        return SessionParamsBody(id=body.session_id)
    if body.session_params is not None and not body.session_params.id:
        raise InvalidRequest("Invalid request session id", param="session_params.id")
    return body.session_params


def _input(body: GenerateBody) -> TextInput | TokenInput:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("Either text or input_ids should be provided, not both.", param="text")
    if body.input_ids is None:
        assert isinstance(body.text, str), "batches were refused"
        return TextInput(body.text)
    try:
        return TokenInput(tuple(msgspec.convert(body.input_ids, TokenIds)))
    except msgspec.ValidationError:
        raise InvalidRequest("input_ids must be token ids.", param="input_ids") from None


def _sampling(body: GenerateBody) -> SamplingBody:
    """Return the sampling options under our names.

    Raises:
        InvalidRequest: `min_new_tokens` above `max_new_tokens`.
    """
    assert not isinstance(body.sampling_params, list), "batches were refused"
    fields = msgspec.structs.asdict(body.sampling_params or GenerateSampling())
    del fields["n"]
    for name in ("ebnf", "structural_tag"):
        if fields.pop(name):
            raise UnsupportedOperation(
                f"{name} is not supported here.", param=f"sampling_params.{name}"
            )
    if fields["max_tokens"] is not None:
        fields["max_tokens"] = min(fields["max_tokens"], MAX_OUTPUT_TOKENS)
    sampling = SamplingBody(**fields)
    max_tokens = DEFAULT_MAX_NEW_TOKENS if sampling.max_tokens is None else sampling.max_tokens
    if (sampling.min_tokens or 0) > max_tokens:
        raise InvalidRequest("min_new_tokens is above max_new_tokens.", param="sampling_params")
    if not body.return_logprob:
        return sampling
    start = body.logprob_start_len
    return msgspec.structs.replace(
        sampling,
        logprobs=True,
        top_logprobs=body.top_logprobs_num,
        prompt_logprobs_from=None if start is None or start < 0 else start,
    )
