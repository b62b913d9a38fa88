"""The `openai` package against a real server: what a whole conversation costs, and that nothing of
it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from session_server.local_server import LocalServer

SAID = ("My name is Ada.", "My city is Oslo.", "What is my name?", "What is my city?")


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(trust_env=False),
        max_retries=0,
        _strict_response_validation=True,
    ) as made:
        yield made


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> ChatCompletion:
    model = "session-server-embedded"
    completion: ChatCompletion = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=40, **options
    )
    return completion


def tokens(completion: ChatCompletion) -> tuple[int, int, int]:
    """Of the context, of it cached, and in all."""
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return usage.prompt_tokens, cached, usage.total_tokens


@pytest.mark.parametrize(
    "named", [{}, {"prompt_cache_key": "wire"}, {"extra_body": {"session_id": "w"}}]
)
def test_a_conversation_sent_whole_computes_what_is_new(
    client: openai.OpenAI, named: dict[str, Any]
) -> None:
    messages: list[Any] = [{"role": "system", "content": f"Be brief. {sorted(named)}"}]
    total = 0
    for said in SAID:
        messages.append({"role": "user", "content": said})
        completion = ask(client, messages, **named)
        if total:
            assert tokens(completion)[1] in (total, total - 1)
        total = tokens(completion)[2]
        messages.append({"role": "assistant", "content": completion.choices[0].message.content})
    assert "Ada" in messages[-3]["content"]
    assert "Oslo" in messages[-1]["content"]
    again = ask(client, messages[:-1], **named)
    assert again.choices[0].message.content == messages[-1]["content"]
    context, cached, _ = tokens(again)
    assert context - cached <= 20 + 64  # the last question, and what is no whole page
    apart = ask(client, messages[:-1], prompt_cache_key=f"apart {sorted(named)}")
    assert apart.choices[0].message.content == messages[-1]["content"]


def test_a_stream_that_is_closed_frees_its_session(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count from 1 to 1000."}]
    with client.chat.completions.create(
        model="session-server-embedded", messages=messages, stream=True, max_tokens=1500
    ) as chunks:
        for number, _ in enumerate(chunks):
            if number == 5:
                break
    completion = ask(client, [{"role": "user", "content": "My name is Ada."}])
    assert completion.choices[0].message.content
