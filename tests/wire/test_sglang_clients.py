"""What SGLang's own session tests assert, over plain HTTP against real processes: models of every
layout, on pages of one, four and 256 tokens. At every seventh launch the youngest of several turns
that run is retracted, as in SGLang's tests with `SGLANG_TEST_RETRACT`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from session_server.local_server import LocalServer
from tests.depth import at_depth
from tests.rig.recovery import assert_books_balance
from tests.wire.conftest import SMALL
from tests.wire.layered_models import write_model

Body = dict[str, Any]


NUM_RETRACTED = 4
RETRACTED_TURN_LEN = 120
"""Input and output of each turn of a crowd."""


@dataclass(frozen=True)
class Layout:
    """A family, None for the embedded model, and the size of its pages."""

    family: str | None
    page_size: int

    def __str__(self) -> str:
        return f"{self.family or 'embedded'}-page{self.page_size}"


USUAL = [Layout(None, 1), Layout("gemma3_text", 4), Layout("granitemoehybrid", 256)]
LAYOUTS = at_depth(
    USUAL,
    proof=[
        *USUAL,
        Layout("gemma3_text", 256),
        Layout("deepseek_v2", 256),
        Layout("lfm2", 4),
    ],
)


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


@pytest.fixture(scope="module")
def flags(layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a server is started with, but for the size of its pools."""
    chosen = [*SMALL, "--page-size", str(layout.page_size), "--chunked-prefill-size", "32"]
    chosen += ["--debug-retract-interval", "7"]
    if layout.family is None:
        return chosen
    directory = write_model(layout.family, tmp_path_factory.mktemp(str(layout)))
    return [*chosen, "--model-path", str(directory)]


@pytest.fixture(scope="module")
def http(flags: list[str]) -> Iterator[httpx.Client]:
    with LocalServer(flags) as server:
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as client:
            yield client
        assert_books_balance(server.url)
        assert server.stop() == 0


def sampling(max_new_tokens: int) -> Body:
    return {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
    }


def open_session(http: httpx.Client) -> str:
    session_id = http.post(
        "/open_session", json={"capacity_of_str_len": 1000, "streaming": True}
    ).json()
    assert isinstance(session_id, str)
    return session_id


def generate(http: httpx.Client, session_id: str, text: str, *, tokens: int = 12) -> Body:
    body = {
        "text": text,
        "sampling_params": sampling(tokens),
        "session_params": {"id": session_id, "rid": None},
    }
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    result: Body = answer.json()
    return result


def total_of(answer: Body) -> int:
    meta = answer["meta_info"]
    return int(meta["prompt_tokens"] + meta["completion_tokens"])


def test_kv_cache_inheritance(http: httpx.Client) -> None:
    session_id = open_session(http)
    before = None
    for text in ("Let me tell you", " about a place", " where it is always", " warm"):
        answer = generate(http, session_id, text)
        if before is not None:
            assert answer["meta_info"]["cached_tokens"] in (before, before - 1)
            assert answer["meta_info"]["prompt_tokens"] > before
        before = total_of(answer)
    assert http.post("/close_session", json={"session_id": session_id}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_nth_mid_abort_recovery(http: httpx.Client, stream: bool) -> None:
    session_id = open_session(http)
    first = generate(http, session_id, f"The first turn ({stream=})")
    for index in range(3):
        rid = f"abort-{stream}-{index}"
        body = {
            "text": " a turn that is aborted",
            "sampling_params": sampling(1900),
            "session_params": {"id": session_id},
            "rid": rid,
            "stream": True,
        }
        last: Body = {}
        num_chunks = 0
        with http.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line.removeprefix("data: "))
                num_chunks += 1
                if num_chunks == 3:
                    http.post("/abort_request", json={"rid": rid})
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    after = generate(http, session_id, " and on")
    assert after["meta_info"]["cached_tokens"] in (total_of(first), total_of(first) - 1)


def test_hanging_up_rolls_back_to_the_last_finished_turn(http: httpx.Client) -> None:
    session_id = open_session(http)
    first = generate(http, session_id, "The first turn")
    body = {
        "text": " a turn nobody hears",
        "sampling_params": sampling(1900),
        "session_params": {"id": session_id},
        "stream": True,
    }
    with http.stream("POST", "/generate", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                break
    for _ in range(200):
        body = {"text": " on", "sampling_params": sampling(4), "session_params": {"id": session_id}}
        retry = http.post("/generate", json=body)
        if retry.status_code == 200:
            break
        assert "already has an active request" in retry.json()["error"]["message"]
    else:
        pytest.fail("the session stayed busy")
    assert retry.json()["meta_info"]["cached_tokens"] in (total_of(first), total_of(first) - 1)


def test_a_concurrent_request_is_a_400_and_harms_nobody(http: httpx.Client) -> None:
    session_id = open_session(http)
    started = threading.Event()

    def long_turn() -> Body:
        body = {
            "text": "A long turn",
            "sampling_params": sampling(400),
            "session_params": {"id": session_id},
            "stream": True,
        }
        last: Body = {}
        with http.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    started.set()
        return last

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(long_turn)
        assert started.wait(60)
        body = {"text": "x", "session_params": {"id": session_id}}
        for _ in range(2):
            refused = http.post("/generate", json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == (
                "Streaming session already has an active request."
            )
        first = running.result(60)
    assert first["meta_info"]["completion_tokens"] == 400
    after = generate(http, session_id, " on")
    assert after["meta_info"]["cached_tokens"] in (total_of(first), total_of(first) - 1)


def test_too_long_an_input_is_a_400_and_the_next_turn_is_cached(http: httpx.Client) -> None:
    session_id = open_session(http)
    first = generate(http, session_id, "The first turn")
    body = {
        "input_ids": [10] * 5000,
        "sampling_params": sampling(4),
        "session_params": {"id": session_id},
    }
    refused = http.post("/generate", json=body)
    assert refused.status_code == 400
    assert "exceeds the maximum allowed length" in refused.json()["error"]["message"]
    after = generate(http, session_id, " on")
    assert after["meta_info"]["cached_tokens"] in (total_of(first), total_of(first) - 1)


def test_logprobs_of_a_session_do_not_leak_into_the_next_turn(http: httpx.Client) -> None:
    session_id = open_session(http)
    body = {
        "input_ids": [10, 11, 12, 13],
        "sampling_params": sampling(4),
        "session_params": {"id": session_id},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    meta = http.post("/generate", json=body).json()["meta_info"]
    assert len(meta["output_token_logprobs"]) == 4
    assert [entry[1] for entry in meta["input_token_logprobs"]] == [10, 11, 12, 13]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    assert all(value[0] <= 0 for value in meta["output_token_logprobs"])
    assert "output_token_logprobs" not in generate(http, session_id, " on")["meta_info"]


def test_an_appended_request_gives_what_one_request_of_everything_gives(
    http: httpx.Client,
) -> None:
    session_id = open_session(http)
    history: list[int] = []
    for index in range(3):
        new = [30 + index, 40 + index]
        body = {
            "input_ids": new,
            "sampling_params": sampling(6),
            "session_params": {"id": session_id},
        }
        answer = http.post("/generate", json=body).json()
        whole = http.post(
            "/generate", json={"input_ids": history + new, "sampling_params": sampling(6)}
        ).json()
        assert answer["output_ids"] == whole["output_ids"]
        history += new + answer["output_ids"]


def test_requests_of_a_tree_branch_off_and_share(layout: Layout, http: httpx.Client) -> None:
    session_id = http.post("/open_session", json={"capacity_of_str_len": 1000}).json()

    def ask(input_ids: list[int], **params: object) -> Body:
        body = {
            "input_ids": input_ids,
            "sampling_params": sampling(8),
            "session_params": {"id": session_id, **params},
        }
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        result: Body = answer.json()
        return result

    root = ask(list(range(100, 164)))
    rid = root["meta_info"]["id"]
    one, other = ask([20], rid=rid), ask([20], rid=rid)
    assert one["output_ids"] == other["output_ids"]
    assert one["meta_info"]["prompt_tokens"] == 64 + 8 + 1
    assert other["meta_info"]["cached_tokens"] >= 64 // layout.page_size * layout.page_size
    assert ask([20], rid=rid, drop_previous_output=True)["meta_info"]["prompt_tokens"] == 65


def test_health_generate_flush_and_info(http: httpx.Client) -> None:
    assert http.get("/health_generate").status_code == 200
    assert http.get("/health").status_code == 200
    assert http.post("/flush_cache").status_code == 200
    assert http.get("/get_model_info").json()["is_generation"] is True
    assert http.get("/get_server_info").json()["version"]


def test_turns_that_were_retracted_say_what_one_request_of_everything_gives(
    http: httpx.Client,
) -> None:
    """A crowd: prompts in chunks beside answers, and all but the oldest are retracted."""
    before = num_retractions(http)
    sessions = [open_session(http) for _ in range(NUM_RETRACTED)]
    prompts = [[40 + i, *range(100, 180)] for i in range(NUM_RETRACTED)]

    def ask(session_id: str, input_ids: list[int]) -> list[int]:
        body = {
            "input_ids": input_ids,
            "sampling_params": sampling(RETRACTED_TURN_LEN - len(input_ids)),
            "session_params": {"id": session_id},
        }
        answer = http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        said: list[int] = answer.json()["output_ids"]
        return said

    with ThreadPoolExecutor(NUM_RETRACTED) as pool_of_clients:
        said = list(pool_of_clients.map(ask, sessions, prompts))
    for prompt, tokens in zip(prompts, said, strict=True):
        alone = {"input_ids": prompt, "sampling_params": sampling(len(tokens))}
        assert http.post("/generate", json=alone).json()["output_ids"] == tokens
    assert num_retractions(http, at_least=before + 1) > before


def num_retractions(http: httpx.Client, *, at_least: int = 0) -> int:
    """What the engine has told by now; while it works it tells twice a second."""
    for _ in range(50):
        found = re.search(r"_retractions_total (\d+)", http.get("/metrics").text)
        num = int(found[1]) if found is not None else 0
        if num >= at_least:
            return num
        time.sleep(0.1)
        http.post("/generate", json={"text": "x", "sampling_params": sampling(1)})
    return num
