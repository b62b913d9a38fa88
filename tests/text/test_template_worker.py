"""A chat template in a process of its own: whatever it does costs the turn it is rendered for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone

import msgspec
import pytest

from session_server.core.errors import ServerBusy, TokenizeFailed
from session_server.core.session_events import Message
from session_server.text.chat_template import RenderFrame, RenderJob, TemplateSource
from session_server.text.model_files import ModelFilesError
from session_server.text.template_values import conversation_of
from session_server.text.template_worker import RenderLimits, TemplateWorker
from session_server.text.worker_child import HEADER, Answer, ChildSettings
from tests.text.local_text import LocalRenderer

FRAME = RenderFrame(datetime(2025, 3, 1, 10, tzinfo=timezone(timedelta(hours=1), "CET")))
LIMITS = RenderLimits(cpu_s=0.05, memory_bytes=256 << 20)

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set x = namespace(s='x') %}{% for i in range(99) %}{% set x.s = x.s ~ x.s %}"
    "{% endfor %}{{ x.s }}",
    "format": "{{ '%2000000000d' % 1 }}",
    "padding": "{{ 'x'.ljust(2000000000) }}",
    "indent": "{{ messages | tojson(indent=2000000000) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 900 }}{% endfor %}",
    "sort": "{{ (range(99999) | list * 100) | sort | join }}",
}
"""One of each per message, so that one process shows them all."""

PLAIN = "{{ messages[-1].content }} {{ strftime_now('%H:%M %Z') }}"
SOURCE = (
    "{% set asked = messages[-1].content %}"
    + "".join(f"{{% if asked == '{name}' %}}{what}{{% endif %}}" for name, what in HOSTILE.items())
    + PLAIN
)


def job(*contents: str) -> RenderJob:
    return RenderJob.of([conversation_of([Message("user", each)], ()) for each in contents], FRAME)


@contextlib.asynccontextmanager
async def worker(
    source: str = SOURCE, limits: RenderLimits = LIMITS
) -> AsyncIterator[TemplateWorker]:
    started = await TemplateWorker.start(TemplateSource(source, {}, max_chars=1 << 20), limits)
    try:
        yield started
    finally:
        await started.close()


def test_a_worker_renders_what_this_process_would() -> None:
    async def render() -> list[str]:
        async with worker() as renderer:
            assert renderer.render_now(job("a")) is None
            return await renderer.render(job("a", "é\n\u2028<|x|>"))

    # Not `SOURCE`: even to compile its constants would take this process half a minute.
    expected = LocalRenderer(TemplateSource(PLAIN, {})).render_now(job("a", "é\n\u2028<|x|>"))
    assert asyncio.run(render()) == expected
    assert expected[0] == "a 10:00 CET"


def test_a_template_that_takes_too_much_costs_the_one_turn() -> None:
    async def attack() -> dict[str, str]:
        refusals = {}
        async with worker() as renderer:
            for name in HOSTILE:
                hostile = asyncio.create_task(renderer.render(job(name)))
                await asyncio.sleep(0)  # it is in the process when the next one comes
                # The loop is free meanwhile, and the turn behind it is rendered.
                assert await renderer.render(job("fine")) == ["fine 10:00 CET"]
                with pytest.raises(TokenizeFailed) as refused:
                    await hostile
                refusals[name] = refused.value.message
        return refusals

    refusals = asyncio.run(attack())
    assert all("chat template" in message for message in refusals.values())
    assert "processor time" in refusals["loops"]
    assert "line 1: MemoryError" in refusals["format"]
    assert "1048576 characters" in refusals["output"]


def test_a_worker_that_does_not_answer_is_killed_and_started_again() -> None:
    async def stop() -> None:
        limits = RenderLimits(deadline_s=0.05)
        async with worker(limits=limits) as renderer:
            first = renderer.pid
            assert first is not None
            os.kill(first, signal.SIGSTOP)  # it computes nothing, so no processor time runs out
            with pytest.raises(ServerBusy, match=r"longer than 0\.05 s"):
                await renderer.render(job("a"))
            assert await renderer.render(job("b")) == ["b 10:00 CET"]
            assert renderer.pid not in (None, first)

    asyncio.run(stop())


def test_a_worker_that_died_at_rest_is_started_again_for_the_next_job() -> None:
    async def kill() -> None:
        async with worker() as renderer:
            assert renderer.pid is not None
            os.kill(renderer.pid, signal.SIGKILL)
            os.waitid(os.P_PID, renderer.pid, os.WEXITED | os.WNOWAIT)
            assert await renderer.render(job("a")) == ["a 10:00 CET"]

    asyncio.run(kill())


@pytest.mark.parametrize("num_kills", [1, 2])
def test_a_job_whose_worker_is_killed_by_others_is_given_to_one_more(num_kills: int) -> None:
    async def kill() -> None:
        async with worker() as renderer:
            pids = set[int]()
            request = renderer._process._request

            async def killed(frame: bytes, timeout_s: float) -> Answer:
                if b"killed job" in frame and len(pids) < num_kills:
                    assert renderer.pid is not None
                    pids.add(renderer.pid)
                    os.kill(renderer.pid, signal.SIGSTOP)  # so that it does not answer before
                    os.kill(renderer.pid, signal.SIGKILL)
                return await request(frame, timeout_s)

            renderer._process._request = killed  # type: ignore[method-assign]
            if num_kills == 1:
                assert await renderer.render(job("killed job")) == ["killed job 10:00 CET"]
            else:
                with pytest.raises(ServerBusy, match=r"ended \(status -9\)"):
                    await renderer.render(job("killed job"))
            assert len(pids) == num_kills
            assert await renderer.render(job("b")) == ["b 10:00 CET"]

    asyncio.run(kill())


def test_a_job_whose_worker_crashes_is_not_at_fault() -> None:
    async def crash() -> None:
        async with worker() as renderer:
            assert renderer.pid is not None
            os.kill(renderer.pid, signal.SIGSTOP)
            rendering = asyncio.create_task(renderer.render(job("a")))
            await asyncio.sleep(0)
            os.kill(renderer.pid, signal.SIGSEGV)
            os.kill(renderer.pid, signal.SIGCONT)
            with pytest.raises(ServerBusy, match=r"ended \(status -11\)"):
                await rendering
            assert await renderer.render(job("b")) == ["b 10:00 CET"]

    asyncio.run(crash())


def test_a_render_that_nobody_waits_for_leaves_the_next_one_its_own_answer() -> None:
    async def cancel() -> None:
        async with worker() as renderer:
            given_up = asyncio.create_task(renderer.render(job("a")))
            await asyncio.sleep(0)
            given_up.cancel()
            assert await renderer.render(job("b")) == ["b 10:00 CET"]

    asyncio.run(cancel())


@pytest.mark.parametrize("source", ["{% if %}", "{% for a in b %}", "{{ ' }}"])
def test_a_template_that_does_not_compile_is_told_at_start(source: str) -> None:
    async def start() -> None:
        async with worker(source):
            pass

    with pytest.raises(ModelFilesError, match=r"does not compile: .*line 1"):
        asyncio.run(start())


def test_text_that_is_no_unicode_is_an_error_of_the_request() -> None:
    async def render() -> None:
        async with worker() as renderer:
            with pytest.raises(TokenizeFailed, match="Unicode"):
                await renderer.render(job("\ud800"))

    asyncio.run(render())


def test_the_process_loads_neither_torch_nor_numpy_and_ends_with_its_socket() -> None:
    code = (
        "import socket, sys; ours, theirs = socket.socketpair(); ours.close()\n"
        "from session_server.text.template_child import serve_template\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'transformers', 'pydantic', 'fastapi'}\n"
        "print(sorted(heavy & set(sys.modules)), serve_template(theirs.detach()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.stdout, done.returncode) == ("[] 0\n", 0), done.stderr


def test_a_process_whose_server_is_gone_ends_in_the_middle_of_a_render() -> None:
    source = msgspec.msgpack.encode(TemplateSource(HOSTILE["loops"], {}))
    settings = ChildSettings(source, 0.05, LIMITS.memory_bytes)
    ours, theirs = socket.socketpair()
    with theirs:
        argv = [sys.executable, "-m", "session_server", "_template", str(theirs.fileno())]
        child = subprocess.Popen(argv, pass_fds=[theirs.fileno()])
    with ours:
        frame = msgspec.msgpack.encode(settings)
        ours.sendall(HEADER.pack(len(frame)) + frame)
        assert ours.recv(1024), "it compiles"
        frame = msgspec.msgpack.encode(job("a"))
        ours.sendall(HEADER.pack(len(frame)) + frame)
    assert child.wait(timeout=60) == -signal.SIGPROF
