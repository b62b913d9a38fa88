"""The `openai` package against a real server: what a whole conversation costs, and that nothing of
it is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

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


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    is_old: bool


def test_a_response_is_held_to_the_type_that_is_asked_for(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="session-server-embedded",
        input="My name is Ada.",
        text_format=Person,
        max_output_tokens=300,
        temperature=0,
    )
    assert parsed.status == "completed"
    assert isinstance(parsed.output_parsed, Person)
    assert parsed.text is not None
    assert parsed.text.format is not None
    assert parsed.text.format.type == "json_schema"


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


def test_an_echoed_prompt_has_its_own_logprobs(client: openai.OpenAI) -> None:
    def scores(prompt: Any, **options: Any) -> tuple[list[str], list[float | None]]:
        answer = client.completions.with_raw_response.create(
            model="session-server-embedded", prompt=prompt, temperature=0, logprobs=1, **options
        )
        logprobs = json.loads(answer.content)["choices"][0]["logprobs"]
        return logprobs["tokens"], logprobs["token_logprobs"]

    prompt = "My name is Ada. What is my"
    tokens, plain = scores(prompt, max_tokens=6)
    echoed_tokens, echoed = scores(prompt, max_tokens=6, echo=True)
    assert (echoed_tokens[-6:], echoed[-6:]) == (tokens, plain)
    assert "".join(echoed_tokens[:-6]) == prompt
    assert echoed[0] is None
    whole = prompt + "".join(tokens)
    again_tokens, again = scores(whole, max_tokens=0, echo=True)
    assert again_tokens == echoed_tokens
    assert again[1:] == pytest.approx(echoed[1:], abs=1e-3)
