"""What is promised of every layout, over sockets: one prompt for several answers, and answers that
go on."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.rig.recovery import assert_books_balance
from tests.wire.conftest import SMALL
from tests.wire.layered_models import write_model

PAGE_SIZE = 4
FAMILIES = at_depth(
    ("gemma3_text", "lfm2"),
    proof=("qwen3", "gemma3_text", "deepseek_v2", "lfm2", "granitemoehybrid"),
)


@pytest.fixture(scope="module", params=FAMILIES)
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    flags = [*SMALL, "--page-size", str(PAGE_SIZE), "--chunked-prefill-size", "32"]
    directory = write_model(request.param, tmp_path_factory.mktemp(request.param))
    flags += ["--model-path", str(directory)]
    with LocalServer(flags) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as client:
            yield client
        assert_books_balance(server.url)
        assert server.stop() == 0


def counted(http: httpx.Client) -> tuple[int, int]:
    """Tokens of the prompts of all turns, and of them not computed again."""
    lines = http.get("/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    names = ("prompt_tokens_total", "prompt_tokens_cached_total")
    total, cached = (int(float(values[f"session_server_{name}"])) for name in names)
    return total, cached


@pytest.mark.parametrize("kind", ["named", "without a name", "appended"])
def test_several_answers_compute_one_prompt(http: httpx.Client, kind: str) -> None:
    def names() -> dict[str, Any]:
        """Another conversation each time."""
        match kind:
            case "named":
                return {"session_id": secrets.token_hex(4)}
            case "appended":
                opened = http.post("/v1/sessions", json={"instructions": "Be long."}).json()
                return {"session_params": {"id": opened["id"]}}
        return {"prompt_cache_key": secrets.token_hex(4)}

    question = [{"role": "user", "content": f"{kind} " + "How far is it? " * 12}]
    body = {"messages": question, "max_tokens": 6, "ignore_eos": True, "temperature": 1.5}
    total, cached = counted(http)
    answer = http.post("/v1/chat/completions", json=body | names() | {"n": 4, "seed": 3})
    assert answer.status_code == 200, answer.text
    usage, choices = answer.json()["usage"], answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert usage["completion_tokens"] == 24
    assert usage["total_tokens"] == usage["prompt_tokens"] + 24
    new_total, new_cached = counted(http)
    assert new_total - total == 4 * usage["prompt_tokens"]
    assert usage["prompt_tokens"] % PAGE_SIZE, "what ends with a page is not matched whole"
    computed = new_total - total - (new_cached - cached)
    assert computed <= usage["prompt_tokens"] + 3 * PAGE_SIZE
    alone = http.post("/v1/chat/completions", json=body | names() | {"seed": 5})
    assert alone.json()["choices"][0]["message"] == choices[2]["message"]
    assert len({choice["message"]["content"] for choice in choices}) > 1


def run_turn(
    http: httpx.Client, session: str, turn_id: str, max_tokens: int, **fields: Any
) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 1.2, "seed": 7, "ignore_eos": True}
    body = {"turn_id": turn_id, "sampling": sampling} | fields
    answer = http.post(f"/v1/sessions/{session}/turns", json=body)
    assert answer.status_code == 200, answer.text
    turn: dict[str, Any] = answer.json()
    return turn


def test_a_cooled_session_finds_its_pages_and_says_the_same(http: httpx.Client) -> None:
    run = partial(run_turn, http)
    warm, cooled = (http.post("/v1/sessions", json={}).json()["id"] for _ in range(2))
    for session in (warm, cooled):
        run(session, "t1", 9, input="How far is it? " * 9)
    answer = http.post(f"/v1/sessions/{cooled}/cool")
    assert answer.json()["state"] == "cold"
    ends = [run(session, "t2", 9, input="And back?") for session in (warm, cooled)]
    assert ends[0]["item"]["token_ids"] == ends[1]["item"]["token_ids"]
    assert ends[1]["usage"]["cached_tokens"] >= ends[0]["usage"]["cached_tokens"] - PAGE_SIZE


def test_a_continued_answer_is_one_that_was_never_cut(http: httpx.Client) -> None:
    run = partial(run_turn, http)
    for cut in range(1, PAGE_SIZE + 2):
        whole, parts = (http.post("/v1/sessions", json={}).json()["id"] for _ in range(2))
        question = {"input": "How far is it?"}
        expected = run(whole, "t1", 9, **question)
        first = run(parts, "t1", cut, **question)
        rest = run(parts, "t2", 9 - cut, **{"continue": True})
        assert rest["text"] == expected["text"]
        assert rest["item"]["id"] == first["item"]["id"]
        ids = first["item"]["token_ids"] + rest["item"]["token_ids"]
        assert ids == expected["item"]["token_ids"]
        assert rest["usage"]["input_tokens"] == first["usage"]["total_tokens"]
        said = [http.get(f"/v1/sessions/{each}/items").json()["data"] for each in (whole, parts)]
        assert [[item["content"] for item in items] for items in said] == [
            ["How far is it?", expected["text"]]
        ] * 2
        after = [run(each, "t3", 4, input="And back?") for each in (whole, parts)]
        assert after[0]["item"]["token_ids"] == after[1]["item"]["token_ids"]
