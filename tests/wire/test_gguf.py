"""A GGUF file, and nothing beside it, serves what the checkpoint it was written from serves."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from session_server.cli import main
from session_server.client import connect
from session_server.demo import MODEL_DIR
from session_server.local_server import LocalServer
from tests.oracle.gguf_files import write_gguf
from tests.oracle.gguf_tokens import describe_byte_level
from tests.wire.conftest import SMALL

QUESTION = "How far is it?"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, half of its matrices in eight bits; `twin` beside it is what it means."""
    root = tmp_path_factory.mktemp("gguf")
    twin = root / "twin"
    shutil.copytree(MODEL_DIR, twin)

    def describe(writer: GGUFWriter) -> None:
        describe_byte_level(writer, MODEL_DIR, "smollm")
        writer.add_float32("general.sampling.temp", 0.0)

    eight = GGMLQuantizationType.Q8_0
    return write_gguf(twin, root / "tiny-q8.gguf", lambda _: eight, describe)


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[LocalServer]:
    with LocalServer([*SMALL, "--model-path", str(path)]) as running:
        yield running
        assert running.stop() == 0


def answer(url: str) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_its_answers_are_those_of_the_weights_it_stands_for(path: Path) -> None:
    # Kernels of our own round what codes are multiplied with, so both are computed by torch.
    flags = [*SMALL, "--attention-backend", "cpu", "--model-path"]
    with LocalServer([*flags, str(path)]) as codes:
        said = answer(codes.url)
    with LocalServer([*flags, str(path.parent / "twin")]) as twin:
        assert said == answer(twin.url) != ""


def test_a_session_over_a_socket_goes_on(server: LocalServer) -> None:
    async def talk() -> None:
        async with await connect(server.url) as session:
            first = await session.ask(QUESTION)
            second = await session.ask("And back?")
            assert first.text
            assert second.usage.cached_tokens > 0

    asyncio.run(talk())


def test_it_is_named_by_its_file(server: LocalServer) -> None:
    models = httpx.get(f"{server.url}/v1/models", trust_env=False).json()
    assert [model["id"] for model in models["data"]] == ["tiny-q8"]


def test_doctor_and_inspect_read_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model-path", str(path), "--port", "0", "--json"]) == 0
    findings = {f["topic"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["model"]["found"].startswith("qwen3, ")
    assert findings["tokenizer"]["verdict"] == "good"
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["path"] == str(path)


def test_doctor_says_what_is_wrong_with_a_damaged_file(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(path.read_bytes()[:-100])
    assert main(["doctor", "--model-path", str(damaged), "--port", "0"]) == 1
    assert "truncated" in capsys.readouterr().out
