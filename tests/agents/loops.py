"""Agents that send their whole conversation with every call of Chat Completions, many at once.

Of each call the server tells how many tokens of the context it had already. *New* are those that
no call before has read or said. Where the template keeps what was said, only these have to be
computed. Where it drops an answer's thinking as soon as another message follows, the rest of that
answer is read again behind other tokens, so new is then all that follows the context of the call
before: no cache of prefixes can do better. A history that is cut loses the page that the cut is in.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import openai
from openai.types.chat import ChatCompletion

from session_server.local_server import LocalServer
from tests.rig.recovery import assert_books_balance
from tests.wire.conftest import FLAGS
from tests.wire.layered_models import write_model

LAYOUTS: Final = {
    "full": "qwen3",
    "full and windows": "gemma3_text",
    "windows": "mistral_window",
    "latents": "deepseek_v3",
    "full and recurrent": "qwen3_5_text",
}
"""A family of models for each layout of memory."""

Thinking = Literal["kept", "dropped"]
Naming = Literal["nothing", "prompt_cache_key", "session_id"]
NAMINGS: Final[tuple[Naming, ...]] = ("nothing", "prompt_cache_key", "session_id")
"""What a call says of the session it belongs to."""

MAX_COMPUTED: Final = 1.05
"""Tokens that may be computed for each that is new."""

PAGE_SIZE: Final = 16
CONTEXT_LEN: Final = 16_384
ANSWER_LEN: Final = 24
NUM_WORDS: Final = 90
"""In an observation; they are about three hundred tokens, as a short file or a test's output is."""

_DROPPING: Final = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if message['role'] == 'assistant' -%}
{%- set content = content[content|length // 2:] -%}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + content + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""The first half of an answer stands for its thinking: random weights know no mark for it."""

_WORDS: Final = ("files", "tests", "server", "found", "error", "report", "build", "done")


@dataclass
class Agent:
    """One agent: its conversation, and what its calls have cost."""

    name: str
    thinking: Thinking
    naming: Naming
    messages: list[Any] = field(default_factory=list)
    num_new: int = 0
    num_uncached: int = 0
    _num_known: int = 0

    async def work(self, client: openai.AsyncOpenAI, num_calls: int) -> None:
        """Ask, read the answer, observe something, and ask again."""
        rng = random.Random(self.name)
        self.messages.append({"role": "system", "content": f"You are agent {self.name}."})
        for _ in range(num_calls):
            words = " ".join(rng.choice(_WORDS) for _ in range(NUM_WORDS))
            self.messages.append({"role": "user", "content": f"{words}?"})
            answer = await self._call(client)
            self.messages.append({"role": "assistant", "content": answer})

    async def _call(self, client: openai.AsyncOpenAI) -> str:
        named: dict[str, Any] = {
            "nothing": {},
            "prompt_cache_key": {"prompt_cache_key": "agents"},
            "session_id": {"extra_body": {"session_id": f"agent-{self.name}"}},
        }[self.naming]
        completion: ChatCompletion = await client.chat.completions.create(
            model="",
            messages=self.messages,
            max_tokens=ANSWER_LEN,
            temperature=1,
            seed=len(self.messages),
            **named,
        )
        usage, content = completion.usage, completion.choices[0].message.content
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens is not None
        assert content is not None
        self.num_new += usage.prompt_tokens - self._num_known
        self.num_uncached += usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
        self._num_known = usage.prompt_tokens
        if self.thinking == "kept":
            self._num_known = usage.total_tokens
        return content


def excess(agent: Agent) -> float:
    """Return how many tokens more than it may an agent has computed."""
    return agent.num_uncached - MAX_COMPUTED * agent.num_new


@contextmanager
def served(layout: str, thinking: Thinking, directory: Path) -> Iterator[LocalServer]:
    """A server of a random model that has this layout, and its books at the end."""
    model = write_model(LAYOUTS[layout], directory, max_position_embeddings=CONTEXT_LEN)
    if thinking == "dropped":
        (model / "chat_template.jinja").write_text(_DROPPING, "utf-8")
    sizes = ["--context-length", str(CONTEXT_LEN), "--max-total-tokens", "131072"]
    pages = ["--page-size", str(PAGE_SIZE)]
    with LocalServer([*FLAGS, *sizes, *pages, "--model-path", str(model)]) as server:
        yield server
        assert_books_balance(server.url, is_running=False)
        assert server.stop() == 0


def work(
    server: LocalServer, thinking: Thinking, naming: Naming, *, num_agents: int, num_calls: int
) -> list[Agent]:
    """Let agents work at the same time."""
    agents = [Agent(f"{naming} {number}", thinking, naming) for number in range(num_agents)]
    asyncio.run(_work(server.url, agents, num_calls))
    return agents


async def _work(url: str, agents: list[Agent], num_calls: int) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        max_retries=0,
    ) as client:
        await asyncio.gather(*(agent.work(client, num_calls) for agent in agents))
