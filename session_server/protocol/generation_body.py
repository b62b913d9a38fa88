"""Describe SGLang's answer to a generation, which is put together of parts encoded before."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

ScoreTriple = tuple[float | None, int, str | None]
"""Of a token: its logprob, its id, and its text if that was asked for."""


class StopReason(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="stop"):
    """The answer ended by itself; `matched` is the token id or string that ended it."""

    matched: int | str | None


class LengthReason(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="length"):
    """The answer has as many tokens as it may have."""

    length: int


class AbortReason(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="abort"):
    """The turn was aborted or failed; its session is as it was before."""

    message: str
    status_code: int | None
    err_type: str | None


class GenerationMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer besides its text. `e2e_latency`, of a finished one: seconds since
    the request. `durable`, of one in a session that is stored: whether the turn is on disk.
    `weight_version` is always the same."""

    id: str
    finish_reason: StopReason | LengthReason | AbortReason | None
    prompt_tokens: int
    weight_version: Literal["default"]
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    durable: bool | UnsetType = UNSET
    input_token_logprobs: list[ScoreTriple] | UnsetType = UNSET
    output_token_logprobs: list[ScoreTriple] | UnsetType = UNSET
    input_top_logprobs: list[list[ScoreTriple] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[ScoreTriple] | None] | UnsetType = UNSET


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True):
    """The answer so far, or the whole one."""

    text: str
    output_ids: list[int]
    meta_info: GenerationMeta
