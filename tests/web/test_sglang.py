"""SGLang's contract, as its clients rely on it, over plain HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from session_server.core.commands import FlushCache, SubmitTurn
from session_server.core.owner import ANONYMOUS, Owner
from session_server.sessions.quotas import QuotaLimits
from session_server.web import sglang
from tests.web.serving import DEADLINE_S, WORD, Served, served, serving, turn


@served()
async def test_a_session_inherits_its_kv_turn_by_turn(this: Served) -> None:
    session_id = await open_session(this, session_id="opt", timeout=60)
    assert session_id == "opt"
    total = None
    for _ in range(4):
        answer = await generate(this, [7, 8, 9], session_id)
        meta = answer["meta_info"]
        if total is not None:
            assert meta["cached_tokens"] in (total, total - 1)
            assert meta["prompt_tokens"] == total + 3
        total = meta["prompt_tokens"] + meta["completion_tokens"]
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert answer["output_ids"] == [WORD] * 4
        assert meta["e2e_latency"] > 0
        assert meta["weight_version"] == "default"


@served()
async def test_opening_twice_fails_and_closing_never_does(this: Served) -> None:
    await open_session(this, session_id="opt")
    twice = await this.http.post("/open_session", json={"session_id": "opt"})
    assert twice.status_code == 400
    assert twice.json()["error"]["message"] == (
        "Failed to open the session. Check if a session with the same id is still open."
    )
    for _ in range(2):
        closed = await this.http.post("/close_session", json={"session_id": "opt"})
        assert (closed.status_code, closed.content) == (200, b"")
    missing = await this.http.post("/generate", json=body([7], "opt"))
    assert missing.status_code == 400
    assert missing.json()["error"]["message"] == ("Invalid request: session id opt does not exist")


@served()
async def test_a_request_without_a_session_leaves_none_behind(this: Served) -> None:
    answer = await generate(this, [7])
    assert answer["meta_info"]["completion_tokens"] == 4
    text = await this.http.post("/generate", json={"text": "Hello", "unknown_key": {"a": [1]}})
    assert text.json()["meta_info"]["completion_tokens"] == 128
    assert (await this.http.get("/health_generate")).status_code == 200
    refused = await this.http.post("/generate", json=body([7] * 5000))
    assert refused.status_code == 400
    assert "exceeds the maximum allowed length" in refused.json()["error"]["message"]
    await this.until(lambda: this.sessions.stats().sessions == 0)


@served()
async def test_a_probe_does_not_wait_for_an_engine_that_restarts(this: Served) -> None:
    this.engine.die()
    await this.until(lambda: this.sessions.engine_ready is None)
    probe = asyncio.create_task(this.http.get("/health_generate"))
    await asyncio.wait([probe], timeout=1.0)
    this.engine.come_up()
    assert (await probe).status_code == 503
    await this.until(lambda: this.sessions.engine_ready is not None)
    assert (await this.http.get("/health_generate")).status_code == 200


def test_the_server_is_probed_though_clients_hold_all_there_is() -> None:
    async def check() -> None:
        async with serving(quotas=QuotaLimits(sessions=1, turns=1)) as this:
            session_id = await this.open()
            assert (await this.http.post("/v1/sessions", json={})).status_code == 503
            this.is_held = True
            body = turn(input_ids=[7], on_disconnect="detach")
            running = asyncio.create_task(
                this.http.post(f"/v1/sessions/{session_id}/turns", json=body)
            )
            await this.until(lambda: this.sessions.stats().live_turns == 1)
            probes = [asyncio.create_task(this.http.get("/health_generate")) for _ in range(5)]
            await this.until(lambda: this.sessions.stats().live_turns == 2)
            this.is_held = False
            assert {(await probe).status_code for probe in probes} == {200}
            assert (await running).status_code == 200
            assert this.sessions.stats().sessions == 1
            sent = [each for each in this.engine.seen if isinstance(each, SubmitTurn)]
            # Probes at the same time are one turn, and it passes those that wait.
            assert sorted(each.priority for each in sent) == [0, 100]

    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))


@served()
async def test_a_stream_is_cumulative_and_ends_with_done(this: Served) -> None:
    request = body([7]) | {"stream": True, "rid": "r1"}
    answer = await this.http.post("/generate", json=request)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 4
    assert chunks[0]["meta_info"]["finish_reason"] is None
    assert {chunk["meta_info"]["id"] for chunk in chunks} == {"r1"}
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert chunks[-1]["text"].startswith(chunks[0]["text"])


@served()
async def test_an_aborted_turn_answers_200_and_rolls_back(this: Served) -> None:
    session_id = await open_session(this)
    first = (await generate(this, [7, 8], session_id))["meta_info"]
    for stream in (False, True):
        request = body([7], session_id, max_new_tokens=4000) | {"rid": "r2", "stream": stream}
        asking = asyncio.create_task(this.http.post("/generate", json=request))
        await this.until(lambda: this.engine.is_busy)
        missed = await this.http.post("/abort_request", json={"rid": "r"})
        assert missed.status_code == 200
        assert this.engine.is_busy, "a prefix of a rid is another rid"
        assert (await this.http.post("/abort_request", json={"rid": "r2"})).status_code == 200
        answer = await asking
        assert answer.status_code == 200
        ended = json.loads(answer.text.split("data: ")[-2]) if stream else answer.json()
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
    total = first["prompt_tokens"] + first["completion_tokens"]
    after = (await generate(this, [7], session_id))["meta_info"]
    assert after["prompt_tokens"] == total + 1
    assert after["cached_tokens"] in (total, total - 1)


@served()
async def test_others_are_served_while_abort_all_goes_on(this: Served) -> None:
    passes: list[int] = []

    async def count() -> None:
        while True:
            passes.append(len(canceled))
            await asyncio.sleep(0)

    this.is_held = True
    canceled: list[str] = []
    state = this.app.state.sglang
    turns = [("s", f"t{number}") for number in range(7)]
    for number, each in enumerate(turns):
        state.add(ANONYMOUS, f"r{number}", each)
    state.add(Owner("another"), "r", ("s", "t"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang, "ABORTED_AT_ONCE", 3)
        patch.setattr(this.sessions, "cancel", lambda *which, **_: canceled.append(which[2]))
        counting = asyncio.create_task(count())
        await this.http.post("/abort_request", json={"abort_all": True})
        counting.cancel()
    assert canceled == [turn_id for _, turn_id in turns]
    assert sorted(set(passes)) == [0, 3, 6, 7]
    for number, each in enumerate(turns):
        state.remove(ANONYMOUS, f"r{number}", each)
    assert state.turns_of(ANONYMOUS, None) == state.turns_of(ANONYMOUS, "r0") == []


@served()
async def test_abort_all_ends_every_request_of_the_caller(this: Served) -> None:
    this.is_held = True
    requests = [body([7], max_new_tokens=4000) for _ in range(3)]
    asking = [asyncio.create_task(this.http.post("/generate", json=item)) for item in requests]
    await this.until(lambda: this.sessions.stats().live_turns == 3)
    flushing = asyncio.create_task(this.http.post("/flush_cache"))
    await this.until(lambda: isinstance(this.engine.commands[-1], FlushCache))
    await this.http.post("/abort_request", json={"rid": "", "abort_all": True})
    this.is_held = False
    answers = await asyncio.gather(*asking)
    assert {a.json()["meta_info"]["finish_reason"]["type"] for a in answers} == {"abort"}
    assert (await flushing).status_code == 400


@served()
async def test_a_second_request_is_rejected_and_disturbs_nothing(this: Served) -> None:
    session_id = await open_session(this)
    this.is_held = True
    first = asyncio.create_task(this.http.post("/generate", json=body([7, 8], session_id)))
    await this.until(lambda: this.sessions.stats().live_turns == 1)
    for _ in range(2):
        second = await this.http.post("/generate", json=body([7], session_id))
        assert second.status_code == 400
        assert second.json()["error"]["message"] == (
            "Streaming session already has an active request."
        )
    this.is_held = False
    assert (await first).json()["meta_info"]["prompt_tokens"] == 2


@served()
async def test_closing_while_a_turn_runs_says_so_to_the_next(this: Served) -> None:
    session_id = await open_session(this, session_id="opt")
    this.is_held = True
    first = asyncio.create_task(this.http.post("/generate", json=body([7], session_id)))
    await this.until(lambda: this.sessions.stats().live_turns == 1)
    await this.http.post("/close_session", json={"session_id": session_id})
    refused = await this.http.post("/generate", json=body([7], session_id))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "Invalid request: close was requested for session opt"
    )
    this.is_held = False
    assert (await first).status_code == 200


@served()
async def test_a_client_that_hangs_up_rolls_its_turn_back(this: Served) -> None:
    session_id = await open_session(this)
    async with httpx.AsyncClient(base_url=this.url, trust_env=False) as client:
        request = body([7], session_id, max_new_tokens=4000) | {"stream": True}
        asking = asyncio.create_task(client.post("/generate", json=request))
        await this.until(lambda: this.engine.is_busy)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await this.until(lambda: this.sessions.stats().live_turns == 0)
    assert (await generate(this, [7], session_id))["meta_info"]["prompt_tokens"] == 1


@served()
async def test_logprobs_come_as_triples(this: Served) -> None:
    request = body([7]) | {"return_logprob": True, "return_text_in_logprobs": True}
    meta = (await this.http.post("/generate", json=request)).json()["meta_info"]
    assert len(meta["output_token_logprobs"]) == 4
    logprob, token_id, text = meta["output_token_logprobs"][0]
    assert (logprob, token_id) == (-0.5, WORD)
    assert isinstance(text, str)
    assert meta["input_token_logprobs"] == []


@served()
async def test_what_makes_no_sense_is_a_400_with_the_text_clients_match(this: Served) -> None:
    session_id = await open_session(this)
    params = {"id": session_id}
    for request, message in (
        ({"text": "a", "input_ids": [1]}, "Either text or input_ids"),
        ({}, "Either text or input_ids"),
        ({"text": ["a", "b"]}, "a batch"),
        ({"input_ids": [[1], [2]]}, "a batch"),
        ({"input_ids": ["a"]}, "token ids"),
        ({"text": "a", "sampling_params": {"n": 2}}, "at most 1"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "at least 0"),
        ({"text": "a", "session_params": {}}, "Invalid request session id"),
        ({"text": "a", "session_id": "x", "session_params": params}, "cannot both be set"),
        ({"input_ids": [], "session_params": params}, "must contain input tokens"),
        ({"text": "a", "session_params": params | {"replace": True}}, "do not support replace."),
        ({"text": "a", "session_params": params | {"offset": 3}}, "do not support offset."),
        (
            {"text": "a", "session_params": params | {"drop_previous_output": True}},
            "do not support drop_previous_output.",
        ),
    ):
        answer = await this.http.post("/generate", json=request)
        assert answer.status_code == 400, request
        assert message in answer.json()["error"]["message"], request
    assert (await generate(this, [7], session_id))["meta_info"]["prompt_tokens"] == 1


@served()
async def test_more_tokens_than_fit_are_clipped(this: Served) -> None:
    answer = await generate(this, [7] * 4000, max_new_tokens=100_000)
    assert answer["meta_info"]["completion_tokens"] == 96


@served()
async def test_the_cache_is_flushed_when_idle_and_histories_stay(this: Served) -> None:
    session_id = await open_session(this)
    await generate(this, [7, 8], session_id)
    for method in ("GET", "POST"):
        assert (await this.http.request(method, "/flush_cache")).status_code == 200
    meta = (await generate(this, [7], session_id))["meta_info"]
    assert (meta["prompt_tokens"], meta["cached_tokens"]) == (7, 0)


@served()
async def test_the_server_and_its_model_describe_themselves(this: Served) -> None:
    for path in ("/get_model_info", "/model_info"):
        model = (await this.http.get(path)).json()
        assert (model["is_generation"], model["model_path"]) == (True, "paper")
    for path in ("/get_server_info", "/server_info"):
        server = (await this.http.get(path)).json()
        assert server["version"]
        assert server["max_total_num_tokens"] == (1024 - 1) * 16, "without the padding page"
        (state,) = server["internal_states"]
        assert state == dict.fromkeys(
            ("sessions", "live_turns", "queued_turns", "running", "waiting"), 0
        )


async def open_session(this: Served, **fields: object) -> str:
    """A session's id, which is a bare JSON string."""
    request = {"capacity_of_str_len": 1000, "streaming": True, **fields}
    answer = await this.http.post("/open_session", json=request)
    assert answer.status_code == 200, answer.text
    session_id: str = answer.json()
    assert isinstance(session_id, str)
    return session_id


def body(
    input_ids: list[int], session_id: str | None = None, *, max_new_tokens: int = 4
) -> dict[str, Any]:
    """A `/generate` body as SGLang's own tests write it."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": max_new_tokens,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    request: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling}
    if session_id is not None:
        request["session_params"] = {"id": session_id, "rid": None}
    return request


async def generate(
    this: Served, input_ids: list[int], session_id: str | None = None, *, max_new_tokens: int = 4
) -> dict[str, Any]:
    """One answer."""
    request = body(input_ids, session_id, max_new_tokens=max_new_tokens)
    answer = await this.http.post("/generate", json=request)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@served()
async def test_a_session_that_does_not_stream_is_a_tree_of_requests(this: Served) -> None:
    session_id = await open_session(this, streaming=False)

    async def ask(input_ids: list[int], name: str, **params: object) -> dict[str, Any]:
        request = body(input_ids) | {"rid": name, "session_params": {"id": session_id, **params}}
        answer = await this.http.post("/generate", json=request)
        result: dict[str, Any] = answer.json()
        return {"status": answer.status_code} | result

    root = await ask([7, 8], "r1")
    assert root["meta_info"]["prompt_tokens"] == 2
    child = await ask([9], "r2", rid="r1")
    assert child["meta_info"]["prompt_tokens"] == 2 + 4 + 1
    without = await ask([9], "r3", rid="r1", drop_previous_output=True)
    assert without["meta_info"]["prompt_tokens"] == 3
    cut = await ask([9], "r4", rid="r1", offset=-1)
    assert cut["meta_info"]["prompt_tokens"] == 2 + 3 + 1
    anew = await ask([5], "r5")
    assert anew["meta_info"]["prompt_tokens"] == 1
    replaced = await ask([9], "r6", rid="r1", replace=True)
    assert replaced["meta_info"]["prompt_tokens"] == 7
    gone = await ask([9], "r7", rid="r2")
    assert (gone["status"], gone["error"]["message"]) == (400, "Invalid request session id")
