"""`SamplingParams`: how a turn's tokens are chosen, and which token ids end it.

Plain data with bounds, which `msgspec` checks whenever a value crosses a process or a socket. Stop
strings are text, which the engine does not know: `session_events.TextOptions` has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_OUTPUT_TOKENS = 1 << 20

MAX_GRAMMAR_BYTES = 1 << 17
"""UTF-8 bytes of a grammar's text. Compiling takes up to 250 times as many."""


class Grammar(msgspec.Struct, frozen=True):
    """Say what a turn's output must match, from its first token on.

    `text`: a JSON schema, a regular expression that matches the whole output, or a Lark grammar
    whose rule `start` does (llguidance's syntax); "" where only calls do. `calls`: a Lark grammar
    of calls of tools, which may come instead; "" for none. `before`: a Lark grammar of all of the
    output, with what comes first, such as a thought; `@answer` in it is what `text` says, `@calls`
    is `calls`. "": nothing comes first. `param`: the field in which a client asked for it, which
    errors name; no engine gets it.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)]
    before: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] = ""
    calls: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] = ""
    param: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configure the sampling of one turn. The defaults are the model's plain distribution.

    `temperature` 0 is greedy and exact. `top_k` 0 means all. `seed` makes the sampled text a
    function of (seed, position, logits) alone, whatever else is in the batch; without one the
    server draws a seed. `logit_bias` is added to the raw logits of the named token ids. Penalties
    follow their usual definitions: repetition (Keskar et al. 2019) over prompt and output, presence
    and frequency over the output.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] = 256
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    logit_bias: Annotated[tuple[tuple[int, float], ...], Meta(max_length=MAX_LOGIT_BIAS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    prompt_logprobs_from: Annotated[int, Meta(ge=0)] | None = None
    """First position of the context whose own logprob is requested; None for none."""
    grammar: Grammar | None = None
    """What the output must match; the model may end the turn only where it does."""

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Return whether earlier tokens change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Hold the log-probability of one token before temperature and truncation.

    `logprob` is None for a position that nothing precedes. `top`: the most likely alternatives,
    best first, as (token id, logprob).
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
