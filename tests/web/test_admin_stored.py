"""What operators see of sessions that are on disk alone, and what they may do to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from session_server.core.owner import ANONYMOUS
from session_server.sessions.manager import SessionManager
from session_server.sessions.overview import digest_of_owner
from session_server.sessions.quotas import QuotaLimits
from session_server.sessions.salts import TenantSalts
from session_server.sessions.store import survey
from session_server.sessions.store.database import Durability
from session_server.sessions.store.session_store import SessionStore
from session_server.web.keys import KeyRing
from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import WORD, Served, model_text, serving_over, turn
from tests.web.test_admin_sessions import DEADLINE_S, KEYS, URL, rows
from tests.web.test_keys import ring_of

NUM_SESSIONS = 9
SORTS = ("opened", "active", "tokens", "turns", "cached", "ttft")

Check = Callable[[Served], Awaitable[None]]


@contextlib.asynccontextmanager
async def served_from(
    directory: Path,
    *,
    max_sessions: int = 100,
    keys: KeyRing | None = None,
    durability: Durability = "turn",
) -> AsyncIterator[Served]:
    """A server with a store."""
    engine = PaperEngine(vocab_size=1536, eos_ids=(4,), next_token=lambda context: WORD)
    manager = SessionManager(
        engine,
        model_text(),
        salts=TenantSalts(bytes(32)),
        quotas=QuotaLimits(sessions=max_sessions),
    )
    store = SessionStore.in_directory(directory, model=b"model", durability=durability)
    store.start(asyncio.get_running_loop())
    manager.store_in(store)
    try:
        async with serving_over(
            engine, manager, **({} if keys is None else {"keys": keys})
        ) as this:
            yield this
    finally:
        await store.close()


def run(check: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(check(), DEADLINE_S))  # type: ignore[arg-type]


async def fill(this: Served, names: list[str], key: str | None = None) -> None:
    headers = {} if key is None else KEYS[key]
    for number, name in enumerate(names):
        opened = await this.http.post("/v1/sessions", json={"id": name}, headers=headers)
        assert opened.status_code == 201, opened.text
        for _ in range(number % 3):
            body = turn(max_tokens=2 + number)
            path = f"/v1/sessions/{name}/turns"
            assert (await this.http.post(path, json=body, headers=headers)).is_success


def test_pages_have_each_session_once_wherever_it_is(tmp_path: Path) -> None:
    names = [f"session-{number}" for number in range(NUM_SESSIONS)]

    async def check() -> None:
        async with served_from(tmp_path) as this:
            await fill(this, names)
            before = {row["session_id"]: row for row in await rows(this)}
        async with served_from(tmp_path) as this:
            assert this.sessions.stats().sessions == 0
            for name in (names[2], names[5]):
                assert (await this.http.get(f"/v1/sessions/{name}")).is_success
            for sort in SORTS:
                for limit in (1, 2, 4, NUM_SESSIONS, 50):
                    found = await rows(this, sort=sort, limit=limit)
                    assert sorted(row["session_id"] for row in found) == names, (sort, limit)
            assert this.sessions.stats().sessions == 2, "nobody was read for a list"
            assert [row["session_id"] for row in await rows(this, sort="opened", limit=2)] == names
            for sort, field in (("tokens", "tokens"), ("turns", "turns")):
                values = [row[field] for row in await rows(this, sort=sort, limit=2)]
                assert values == sorted(values, reverse=True)
            for row in await rows(this):
                was = before[row["session_id"]]
                same = ("tokens", "turns", "owner", "pinned", "queued_turns", "running_turn")
                assert {name: row[name] for name in same} == {name: was[name] for name in same}
                assert row["state"] == "cold"
                assert row["idle_s"] < 60.0
            page = (await this.http.get(URL, params={"limit": 3})).json()
            assert page["total"] == NUM_SESSIONS
            for match, wanted in (
                ("session-4", {"session-4"}),
                ("session-5", {"session-5"}),
                (digest_of_owner(ANONYMOUS), set(names)),
                ("col", {*names} - {names[2], names[5]}),
                ("nobody", set()),
            ):
                answer = (await this.http.get(URL, params={"match": match})).json()
                assert {row["session_id"] for row in answer["data"]} == wanted, match
                assert answer["total"] == len(wanted)

    run(check)


def test_pages_are_whole_while_sessions_leave_the_memory(tmp_path: Path) -> None:
    names = [f"session-{number}" for number in range(NUM_SESSIONS)]

    async def check() -> None:
        async with served_from(tmp_path, max_sessions=3) as this:
            await fill(this, names)
            for sort in SORTS:
                found = [row["session_id"] for row in await rows(this, sort=sort, limit=4)]
                assert sorted(found) == names, sort
            (row,) = await rows(this, match="session-1")
            assert row["id"].startswith("d_")
            assert (await this.http.get("/v1/sessions/session-1")).is_success
            closed = await this.http.post(f"{URL}/{row['id']}/close")
            assert closed.json()["state"] == "closing", "its id holds while it is in memory"
            assert len(await rows(this)) == NUM_SESSIONS - 1

    run(check)


@pytest.mark.parametrize("action", ["close", "cool", "warm", "pin", "unpin", "fork"])
def test_operators_act_on_what_is_on_disk_with_what_its_owner_is_granted(
    tmp_path: Path, action: str
) -> None:
    text = "alice alices\nbob bobs max_sessions=1\nops operators admin=1\n"
    ring = ring_of(tmp_path / "keys", text)

    async def act(this: Served, session_id: str, key: str = "operators") -> Any:
        return await this.http.post(f"{URL}/{session_id}/{action}", headers=KEYS[key])

    async def check() -> None:
        async with served_from(tmp_path / "store", keys=ring) as this:
            await fill(this, ["same"], "alices")
            await fill(this, ["same"], "bobs")
        async with served_from(tmp_path / "store", keys=ring) as this:
            alices, bobs = await rows(this, sort="opened")
            assert alices["id"] != bobs["id"]
            assert (await act(this, bobs["id"], "bobs")).status_code == 403
            for unknown in ("d_1", "d_" + "9" * 18, "d_x", "d_"):
                assert (await act(this, unknown)).status_code == 404
            answer = await act(this, bobs["id"])
            match action:
                case "fork":
                    assert answer.json()["error"]["code"] == "quota_exceeded"
                    assert (await act(this, alices["id"])).json()["owner"] == alices["owner"]
                case "close":
                    assert answer.json()["state"] == "closing"
                    assert (await act(this, bobs["id"])).status_code == 404
                    left = await rows(this)
                    assert [row["id"] for row in left] == [alices["id"]]
                    usage = await this.http.get("/v1/usage", headers=KEYS["bobs"])
                    assert usage.json()["quotas"]["max_sessions"]["held"] == 0
                case _:
                    assert answer.status_code == 200, answer.text
                    assert answer.json()["pinned"] is (action == "pin")
                    assert answer.json()["owner"] == bobs["owner"]

    run(check)


def test_a_survey_reads_on_a_thread_of_its_own_and_a_bounded_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"session-{number}" for number in range(NUM_SESSIONS)]
    answers: list[survey.SurveyAnswer] = []
    on_loop: list[bool] = []

    async def check() -> None:
        looked = survey.survey

        def noted(path: Path, question: survey.SurveyQuestion) -> survey.SurveyAnswer:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                on_loop.append(True)
            answers.append(looked(path, question))
            return answers[-1]

        monkeypatch.setattr("session_server.sessions.store.database.survey", noted)
        async with served_from(tmp_path, max_sessions=2) as this:
            await fill(this, names)
            await rows(this, limit=2)
        assert answers
        assert not on_loop
        assert max(len(answer.found) for answer in answers) <= 3

    run(check)
