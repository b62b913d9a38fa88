"""Answers held to schemas, expressions and grammars, by a real server through every surface."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from session_server.client import connect
from session_server.local_server import LocalServer
from tests.structured.__main__ import answers, is_valid
from tests.structured.schemas import schema_of
from tests.text.test_grammar_worker import BAD

FREE = {"temperature": 0, "max_tokens": 20}
HELLO: Any = [{"role": "user", "content": "Hello."}]
MODEL = "session-server-embedded"


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=30)
    tags: list[Literal["small", "old"]] = Field(max_length=2)


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


def test_parse_gives_a_pydantic_model(client: openai.OpenAI) -> None:
    for seed in range(4):
        done = client.chat.completions.parse(
            model=MODEL, messages=HELLO, response_format=Pet, seed=seed, temperature=1
        )
        assert isinstance(done.choices[0].message.parsed, Pet)
        assert done.choices[0].finish_reason == "stop"


def test_answers_to_random_schemas_are_valid(server: LocalServer) -> None:
    schemas = [schema_of(Random(seed)) for seed in range(24)]
    texts = asyncio.run(answers(server.url, schemas))
    assert all(is_valid(text, schema) for text, schema in zip(texts, schemas, strict=True))


def test_a_stream_is_held_to_it_too(client: openai.OpenAI) -> None:
    pattern = "(yes|no), [a-z]{2,8}[.]"
    chunks = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body={"regex": pattern}, seed=1
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 4}, r"\{.*"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"guided_grammar": 'start: A A\nA: "red" | "blue"'}, "(red|blue){2}"),
    ],
)
def test_names_of_other_servers_hold_it_too(
    http: httpx.Client, fields: dict[str, Any], pattern: str
) -> None:
    body = {"messages": HELLO, "seed": 3, "max_tokens": 60, **fields}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert re.fullmatch(pattern, answer["choices"][0]["message"]["content"], re.DOTALL)


def test_generate_is_held_to_it_too(http: httpx.Client) -> None:
    schema = json.dumps({"enum": ["red", "blue"]})
    body = {"text": "Hello", "sampling_params": {"json_schema": schema, "max_new_tokens": 20}}
    answer = http.post("/generate", json=body).raise_for_status().json()
    assert json.loads(answer["text"]) in ("red", "blue")
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_cannot_be_compiled_is_refused_before_there_is_a_turn(
    http: httpx.Client, name: str
) -> None:
    key = {"json_schema": "json_schema", "regex": "regex", "lark": "grammar"}[BAD[name].kind]
    session = http.post("/v1/sessions", json={}).raise_for_status().json()["id"]
    url = f"/v1/sessions/{session}"
    body = {"input": "Hello.", "sampling": {key: BAD[name].text}, "turn_id": "bad"}
    refused = http.post(f"{url}/turns", json=body)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", f"sampling.{key}")
    assert http.get(f"{url}/turns/bad").status_code == 404
    http.delete(url)


def test_a_refusal_names_the_field_that_was_sent(client: openai.OpenAI) -> None:
    wrong = {"type": "object", "not": {}}
    form: Any = {"type": "json_schema", "name": "a", "schema": wrong}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="Hello.", text={"format": form})
    assert refused.value.param == "text.format.schema"
    for fields, param in (
        ({"guided_json": wrong}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": form}},
            "response_format.json_schema.schema",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_body=fields)
        assert refused.value.param == param


def test_a_turn_without_a_grammar_follows_one_with_it(server: LocalServer) -> None:
    async def talk() -> None:
        async with await connect(server.url) as session:
            held = {"temperature": 0, "regex": "[A-Z]{3}", "ignore_eos": True}
            assert re.fullmatch("[A-Z]{3}", (await session.ask("Hello.", sampling=held)).text)
            free = await session.ask("Hello.", sampling=FREE)
        async with await connect(server.url) as session:
            held |= {"min_tokens": 40, "max_tokens": 60}
            again = await session.ask("Hello.", sampling=held)
            assert re.fullmatch("[A-Z]{3}", again.text), "nothing else could follow"
            assert free.text == (await session.ask("Hello.", sampling=FREE)).text

    asyncio.run(talk())
