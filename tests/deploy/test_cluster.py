"""Replicas under Ray Serve, from the command line to the last process: `make cluster`.

The tests use one cluster, in their order: it is up, grown, sticky, replaced, and down.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from session_server.deploy.routing import tag_in
from tests.deploy.cluster import Cluster, Socket, open_socket, running_cluster
from tests.depth import IS_PROOF
from tests.rig.processes import assert_gone, engines_of

pytest.importorskip("ray", reason="needs the extra `ray`: make cluster")
pytestmark = [
    pytest.mark.skipif(not IS_PROOF, reason="starts clusters for minutes: make cluster"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(Path(tmp_path_factory.mktemp("state"))) as made:
        made.up("--replicas", "1-2")
        yield made


def tag_of_session(session_id: str) -> str:
    tag = tag_in(session_id)
    assert tag is not None
    return tag


def test_a_range_grows_with_its_turns(cluster: Cluster) -> None:
    assert len(cluster.tags()) == 1

    async def run() -> None:
        async with AsyncExitStack() as opened:
            sockets = [await opened.enter_async_context(open_socket(cluster)) for _ in range(8)]
            talks = [asyncio.create_task(socket.talk_until_closed()) for socket in sockets]
            await asyncio.to_thread(cluster.wait_for, 2)
            for talk in talks:
                talk.cancel()
            await asyncio.gather(*talks, return_exceptions=True)

    asyncio.run(run())


def test_two_replicas_are_up_and_say_what_they_do(cluster: Cluster) -> None:
    rows = cluster.status()
    assert [row["state"] for row in rows] == ["running"] * 2
    assert [row["engine"] for row in rows] == ["running"] * 2
    assert len({row["pid"] for row in rows}) == 2
    shown = cluster.run("status").stdout
    assert all(row["replica"] in shown for row in rows)
    assert httpx.get(f"{cluster.url}/ready").json() == {"status": "ready"}


def test_nobody_else_reaches_the_files_of_its_ray(cluster: Cluster) -> None:
    head = cluster.record().head
    assert head is not None
    assert stat.S_IMODE(Path(head.directory).stat().st_mode) == 0o700
    assert any((head.logs / "serve").glob("replica_*.log"))


def test_twelve_sessions_stay_where_they_were_opened(cluster: Cluster) -> None:
    async def run() -> None:
        async with AsyncExitStack() as opened, httpx.AsyncClient(base_url=cluster.url) as http:
            sockets = [await opened.enter_async_context(open_socket(cluster)) for _ in range(6)]
            ids = [socket.session_id for socket in sockets]
            for _ in range(6):
                answer = await http.post("/v1/sessions", json={})
                ids.append(answer.json()["id"])
            for number, session_id in enumerate(ids[6:]):
                body = {"turn_id": f"t{number}", "text": "Hello", "sampling": {"max_tokens": 2}}
                turn = await http.post(f"/v1/sessions/{session_id}/turns", json=body)
                assert turn.status_code in (200, 201), turn.text
            for socket in sockets:
                assert (await socket.ask("t1"))["type"] == "turn.completed"
                seen = await http.get(f"/v1/sessions/{socket.session_id}")
                assert seen.json()["turns"] == 1, "over HTTP and the socket it is one session"
            for session_id in ids[6:]:
                async with open_socket(cluster, session_id) as socket:
                    end = await socket.ask("again")
                    assert end["type"] == "turn.completed", end
            held = Counter(map(tag_of_session, ids))
            rows = {row["replica"]: row["sessions"] for row in cluster.status()}
            assert all(rows[tag] >= count for tag, count in held.items())
            for tag, count in rows.items():  # each answers for its own
                metrics = await http.get("/metrics", params={"replica": tag})
                assert f"session_server_sessions {float(count)}" in metrics.text

    asyncio.run(run())


def test_calls_that_name_their_conversation_find_its_replica(cluster: Cluster) -> None:
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        for name in ("ada", "bob", "eve"):
            body = {
                "messages": [{"role": "user", "content": "Hi"}],
                "session_id": name,
                "max_tokens": 2,
            }
            cached = list[int]()
            for _ in range(3):
                answer = http.post(
                    "/v1/chat/completions", json=body, headers={"x-session-id": name}
                )
                assert answer.status_code == 200, answer.text
                message = answer.json()["choices"][0]["message"]
                body["messages"] += [message, {"role": "user", "content": "More"}]  # type: ignore[operator]
                usage = answer.json()["usage"]
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            assert cached[0] < cached[1] < cached[2], "each goes on where the last one ended"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own use of pydantic
def test_a_replica_that_starts_is_shown_before_it_has_a_process() -> None:
    from ray.serve.schema import ReplicaDetails

    from session_server.deploy.ray_cluster import _row_of

    starting = ReplicaDetails(replica_id="abcdefgh", state="STARTING", start_time_s=1.0)
    row = _row_of(None, starting.model_dump(exclude_unset=True))
    assert (row["state"], row["node"], row["pid"]) == ("starting", None, None)


def test_replicas_are_no_less_urgent_than_a_server_of_its_own(cluster: Cluster) -> None:
    replicas = [psutil.Process(row["pid"]) for row in cluster.status()]
    assert {replica.nice() for replica in replicas} == {psutil.Process().nice()}


def test_a_replica_whose_engine_is_given_up_is_replaced(cluster: Cluster) -> None:
    rows = cluster.status()
    victim = rows[0]
    (engine,) = engines_of(victim["pid"])
    psutil.Process(engine).send_signal(signal.SIGKILL)
    tags = cluster.wait_for(2, without=frozenset({victim["replica"]}))
    assert rows[1]["replica"] in tags, "the other one served on"
    assert_gone([victim["pid"], engine])


def test_a_proxy_that_is_killed_is_back_in_seconds(cluster: Cluster) -> None:
    (proxy,) = (
        process
        for process in map(psutil.Process, cluster.processes())
        if process.cmdline()[:1] == ["ray::ProxyActor"]
    )
    proxy.kill()
    killed_s = time.monotonic()
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{cluster.url}/ready").status_code == 200:
                break
        assert time.monotonic() < killed_s + 20, "Ray looks three times before it begins another"
        time.sleep(0.2)
    cluster.seen |= cluster.processes()


def test_a_rolling_update_is_announced_and_loses_nothing_that_was_not(cluster: Cluster) -> None:
    before = cluster.tags()

    async def run() -> list[Socket]:
        async with AsyncExitStack() as opened:
            sockets = [await opened.enter_async_context(open_socket(cluster)) for _ in range(6)]
            talks = [asyncio.create_task(socket.talk_until_closed()) for socket in sockets]
            await asyncio.sleep(1)
            await asyncio.to_thread(cluster.up, "--replicas", "2", "--drain-timeout", "6")
            await asyncio.gather(*talks)
            return sockets

    sockets = asyncio.run(run())
    assert not before & cluster.tags()
    assert [socket.close_code for socket in sockets] == [1012] * 6
    for socket in sockets:
        assert socket.kinds["session.draining"] == 1, (socket.kinds, socket.ends)
        num_completed = socket.ends.count("turn.completed")
        assert num_completed >= 1
        assert {*socket.ends[:num_completed]} == {"turn.completed"}
        # What was asked for behind that is refused, or was canceled: the client knows of each.
        assert {*socket.ends[num_completed:-1]} <= {"error", "turn.cancelled"}


def test_down_leaves_no_process_and_no_file(cluster: Cluster) -> None:
    head, seen = cluster.record().head, cluster.seen | cluster.processes()
    assert head is not None
    done = cluster.run("down")
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    assert "2 replicas drain" in done.stderr
    assert_gone([*seen])
    assert not Path(head.directory).exists()
    assert cluster.status() == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{cluster.url}/ready")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "Application"),
        ({"replicas": "2-3", "replica_cpus": 4, "replica_gpus": 1}, "Application"),
        ({"replicaz": 2}, "args: there is no replicaz"),
        ({"replicas": "0"}, "args: replicas: expected N, or MIN-MAX"),
    ],
)
def test_a_file_of_ray_serve_makes_the_same_application(
    arguments: dict[str, object], told: str
) -> None:
    code = (
        "from session_server.deploy.application import build\n"
        f"try: print(type(build({arguments!r})).__name__)\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told in done.stdout
