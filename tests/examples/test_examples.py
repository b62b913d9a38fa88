"""Every example as a user runs it: a process of its own against a real server."""

from __future__ import annotations

import json
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import psutil
import pytest

from session_server.local_server import LocalServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(name: str, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_rest_client_remembers_and_streams(url: str) -> None:
    done = run("rest_client.py", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "Your name is Ada." in done.stdout.split("> What is my name?")[1]
    assert "1 2 3 4 5" in done.stdout


def test_the_typing_client_asks_what_is_nearly_computed(url: str) -> None:
    done = run("typing_client.py", "My name is Ada.", "--url", url, "--key-s", "0.01")
    assert done.returncode == 0, done.stderr
    computed, total = map(int, re.findall(r"(\d+) of (\d+) computed", done.stdout)[0])
    assert computed == total
    assert int(re.findall(r"drafted (\d+)", done.stdout)[0]) >= total - 1


def test_the_voice_like_client_is_cut_short_and_remembers(url: str) -> None:
    done = run("voice_like.py", "--url", url, "--word-s", "0.01")
    assert done.returncode == 0, done.stderr
    assert "[cancelled; " in done.stdout
    assert "Ada" in done.stdout.split("> What is my name?")[1]
    spoken = int(re.findall(r"(\d+) tokens of it", done.stdout)[0])
    counts = re.findall(r"(\d+) of (\d+) cached", done.stdout)
    first, last = [tuple(map(int, pair)) for pair in counts]
    assert spoken >= 12
    assert last[1] > first[1] + spoken, "what was said before the cut stays"
    assert last[0] > first[1] + spoken, "and is not computed again"


def test_the_openai_client_computes_what_is_new(url: str) -> None:
    done = run("openai_chat.py", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "Your name is Ada." in done.stdout.split("> What is my name?")[1]
    assert "Oslo" in done.stdout.split("> What is my city?")[1]
    counts = re.findall(r"(\d+) of (\d+) tokens were cached", done.stdout)
    (first, *rest), new = [tuple(map(int, each)) for each in counts], 20
    assert first[0] == 0
    assert len(rest) == 3
    assert all(0 < total - cached <= new for cached, total in rest)


def test_the_realtime_client_computes_what_is_new(url: str) -> None:
    done = run("openai_realtime.py", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "Ada" in done.stdout.split("> What is my name?")[1]
    counts = re.findall(r"(\d+) of (\d+) tokens were cached", done.stdout)
    (first, *rest), new = [tuple(map(int, each)) for each in counts], 20
    assert first[0] == 0
    assert len(rest) == 3
    assert all(0 < total - cached <= new for cached, total in rest)


@pytest.mark.filterwarnings("ignore:connect.. must be used")
def test_the_openai_client_goes_on_from_responses_in_lanes(url: str) -> None:
    done = run("openai_responses.py", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "Your name is Ada." in done.stdout.split("> What is my name?")[1]
    for lane, word in (("name", "Ada"), ("city", "Oslo")):
        assert word in done.stdout.split(f"> [{lane}]")[1].split("tokens were cached")[0]
    counts = re.findall(r"(\d+) of (\d+) tokens were cached", done.stdout)
    assert len(counts) == 6
    assert all(int(cached) > 0 for cached, _ in counts[1:])


def test_the_chat_client_comes_back_to_its_session(url: str) -> None:
    first = run("chat_client.py", "--url", url, stdin="My name is Ada.\n")
    assert first.returncode == 0, first.stderr
    session = first.stdout.split()[1].rstrip(";")
    second = run("chat_client.py", "--url", url, "--session", session, stdin="What is my name?\n")
    assert "Your name is Ada." in second.stdout, second.stderr


def test_the_load_test_judges_answers_and_books(url: str, tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    done = run(
        *("load_test.py", "--url", url, "--sessions", "6", "--turns", "5", "--think-s", "0.05"),
        *("--ramp-s", "0.1", "--abort-rate", "0.2", "--disconnect-rate", "0.3"),
        *("--json", str(report), "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["ok"]
    assert found["turns"] == 30
    assert found["errors"] == {}
    assert found["injected"]["disconnects"] == found["injected"]["reconnects"] > 0
    assert found["injected"]["cancelled"] > 0
    assert found["ledger"]["after"]["violations"] == 0
    assert found["warm_share"] == 1.0
    assert picture.stat().st_size > 1000


def test_an_open_loop_counts_from_when_a_turn_was_due(url: str) -> None:
    done = run(
        *("load_test.py", "--url", url, "--sessions", "4", "--turns", "4", "--loop", "open"),
        *("--think-s", "0.01", "--ramp-s", "0.0", "--json", "-"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["turns"] == 16
    assert found["turn_ms"]["p99"] >= found["turn_ms"]["p50"] > 0


def test_ctrl_c_ends_the_chat_client_though_nothing_is_typed(url: str) -> None:
    argv = [sys.executable, str(EXAMPLES / "chat_client.py"), "--url", url]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith("session ")
        client.send_signal(signal.SIGINT)
        assert client.wait(timeout=60) == -signal.SIGINT
        assert client.stderr is not None
        assert not client.stderr.read()


def test_a_load_on_no_server_is_an_error_and_not_a_traceback() -> None:
    done = run("load_test.py", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no answer" in done.stdout
    assert "ConnectError(" not in done.stdout
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def closed_url() -> Iterator[str]:
    """Where a server is that refuses every key."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            error = {"type": "x", "code": "unauthorized", "message": "Not you.", "param": None}
            body = json.dumps({"error": error}).encode()
            self.send_response(401)
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def said_by(name: str, *argv: str, patch: pytest.MonkeyPatch) -> str | int | None:
    """What a program of this process exits with."""
    patch.setattr(sys, "argv", [name, *argv])
    patch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return left.value.code


@pytest.mark.parametrize(
    "name",
    [
        "rest_client.py",
        "openai_chat.py",
        "openai_agent_loop.py",
        "openai_responses.py",
        "chat_client.py",
        "load_test.py",
    ],
)
def test_a_refused_key_and_an_address_without_a_scheme_are_told_in_a_line(
    name: str,
    closed_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = said_by(name, "--url", closed_url, patch=monkeypatch)
    said = str(refused) + capsys.readouterr().out
    assert "Not you." in said
    assert "pass --api-key" in said
    assert said_by(name, "--url", "localhost:30000", patch=monkeypatch) in {1, 2}
    told = capsys.readouterr()
    assert "as http://HOST:PORT" in told.out + told.err


@pytest.mark.parametrize("name", ["typing_client.py", "voice_like.py"])
def test_the_native_client_tells_a_refused_key_and_a_wrong_address_in_a_line(
    name: str, closed_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = said_by(name, "--url", closed_url, "--api-key", "no", patch=monkeypatch)
    assert "Not you." in str(refused)
    wrong = said_by(name, "--url", "localhost:30000", patch=monkeypatch)
    assert "as http://HOST:PORT" in str(wrong)


@pytest.mark.parametrize(
    "name",
    [
        *("typing_client.py", "voice_like.py", "openai_chat.py", "openai_agent_loop.py"),
        *("openai_responses.py", "openai_realtime.py"),
    ],
)
def test_a_server_that_is_not_there_is_told_in_a_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    told = said_by(name, "--url", f"http://127.0.0.1:{port}", patch=monkeypatch)
    assert "is a server running?" in str(told)


@pytest.mark.parametrize(
    ("name", "package", "advice"),
    [
        ("openai_chat.py", "openai", "pip install -U openai"),
        ("openai_agent_loop.py", "openai", "pip install -U openai"),
        ("openai_responses.py", "openai", "pip install -U openai websockets"),
        ("openai_realtime.py", "openai", "pip install -U 'openai[realtime]'"),
        ("chat_client.py", "websockets", "pip install -U websockets"),
        ("rest_client.py", "httpx", "pip install -U httpx"),
        ("typing_client.py", "session_server", ".venv/bin/python"),
        ("voice_like.py", "session_server", ".venv/bin/python"),
        ("load_test.py", "session_server", ".venv/bin/python"),
    ],
)
def test_a_package_that_is_not_there_is_told_in_a_line(
    name: str, package: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [package, *sys.modules]:
        if module.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, module, None)
    told = str(said_by(name, patch=monkeypatch))
    assert f"{package}" in told.partition(" is not there: ")[0]
    assert advice in told


def test_ctrl_c_ends_a_load_and_reports_it_so_far(url: str) -> None:
    argv = [sys.executable, str(EXAMPLES / "load_test.py"), "--url", url, "--json", "-"]
    argv += ["--sessions", "2", "--turns", "10000", "--think-s", "0.01", "--ramp-s", "0"]
    pipe = subprocess.PIPE

    def num_sessions() -> int:
        return len(httpx.get(f"{url}/v1/sessions").json()["data"])

    before = num_sessions()
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as load:
        while num_sessions() < before + 2:
            assert load.poll() is None, "the load ended before it began"
        load.send_signal(signal.SIGINT)
        output, errors = load.communicate(timeout=60)
    assert load.returncode == 130, errors
    assert "Traceback" not in errors
    assert json.loads(output)["interrupted"]
    assert json.loads(output)["ledger"]["balanced"]


def test_a_share_is_between_none_and_all() -> None:
    done = run("load_test.py", "--abort-rate", "2")
    assert done.returncode == 2
    assert "--abort-rate: expected 0 to 1, got 2.0" in done.stderr


def test_a_load_survives_an_engine_that_is_killed_and_says_what_it_saw(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--sessions", "6", "--turns", "8", "--think-s", "0.2", "--json", str(report)]
    with LocalServer(["--threads", "1"]) as server:
        argv = [sys.executable, str(EXAMPLES / "load_test.py"), "--url", server.url, *flags]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as load:
            while not httpx.get(f"{server.url}/v1/sessions").json()["data"]:
                assert load.poll() is None, "the load ended before it began"
            children = psutil.Process(server.pid).children()
            (engine,) = (child for child in children if "_engine" in child.cmdline())
            engine.kill()
            output, _ = load.communicate(timeout=120)
    found = json.loads(report.read_text())
    assert found["turns"] == 48, output
    assert set(found["errors"]) <= {"failed: engine_restarting"}
    assert found["right_share"] == 1.0
