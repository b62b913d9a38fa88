"""`session-server inspect`: tables for people, JSON for programs, errors with names."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from session_server.config import CacheOptions, ModelOptions, Settings
from session_server.engine_wiring import build_engine
from session_server.inspector import command
from tests.oracle.checkpoints import write_checkpoint
from tests.text.tiny_models import write_model


def inspect(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = write_checkpoint("gemma2", tmp_path / "gemma2")
    return write_model(directory, "chatml")


def rewrite(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if tensor is None else {**tensors, name: tensor}, path)


def test_the_embedded_model_is_what_nobody_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect() == 0
    shown = capsys.readouterr().out
    for words in ("qwen3 · 1.87 M parameters", "context 4,096", "4.1 MiB", "1,024 B"):
        assert words in shown


def test_every_pool_is_a_column(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(str(checkpoint), "--lengths", "100,2000", "--page-size", "4") == 0
    shown = capsys.readouterr().out
    for words in ("pool full", "pool window", "together", "window of 16", "too long"):
        assert words in shown


def test_json_is_the_same_for_a_program(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--json", "--memory", "1MiB", "--lengths", "64", "--dtype", "bfloat16")
    assert inspect(str(checkpoint), *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["path"] == str(checkpoint)
    assert found["model"]["dtype"] == "bfloat16"
    assert found["memory"]["free_bytes"] == 1 << 20
    assert sum(pool["bytes"] for pool in found["pools"]) == found["memory"]["kv_bytes"] <= 1 << 20
    assert [session["length"] for session in found["sessions"]] == [64]
    assert found["sessions"][0]["fit"] > 0


def test_the_context_is_the_one_that_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    """A context may fill the pool, less what is kept for pinned sessions where any is."""
    words = ("--max-total-tokens", "1024", "--json", "--lengths", "767,768,1024")

    def context(*flags: str) -> tuple[int, list[bool]]:
        assert inspect(*words, *flags) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["model"]["model_context_len"] == 4096
        return found["model"]["context_len"], [each["is_too_long"] for each in found["sessions"]]

    settings = Settings(
        model=ModelOptions(device="cpu"),
        cache=CacheOptions(max_total_tokens=1024, pinned_fraction=0.25),
    )
    served, too_long = context("--pinned-fraction", "0.25")
    assert served == build_engine(settings).ready.max_turn_len < 1024
    assert too_long == [served < 767, served < 768, True]
    assert context() == (1024, [False, False, False])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_is_not_here_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*words: str) -> dict[str, Any]:
        assert inspect("--json", "--device", "cuda", "--memory", "80GiB", *words) == 0
        return json.loads(capsys.readouterr().out)

    torch_keeps = found("--dtype", "bfloat16")
    assert (torch_keeps["model"]["device"], torch_keeps["model"]["dtype"]) == ("cuda", "bfloat16")
    assert torch_keeps["memory"]["free_bytes"] == 80 << 30
    # No kernel runs, so none need be installed, nor can TRITON_INTERPRET matter.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("SESSION_SERVER_MODEL__ATTENTION_BACKEND", "triton")
    stored = found("--kv-cache-dtype", "fp8_e4m3", "--dtype", "bfloat16")
    halved = torch_keeps["pools"][0]["bytes_per_token"] / 2
    assert stored["pools"][0]["bytes_per_token"] == halved
    assert "E4M3" in stored["assumed"]


@pytest.mark.usefixtures("no_gpu")
def test_what_is_assumed_of_a_gpu_and_what_it_must_hold_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--memory", "1GiB", "--attention-backend", "triton")
    assert inspect("--device", "cuda", *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "cuda is not here. It is assumed that it reads E4M3" in said
    assert "Weights and KV take 1.0 GiB of it" in said
    assert inspect("--device", "cpu", "--memory", "1GiB") == 0
    assert "is not here" not in capsys.readouterr().out
    assert inspect("--device", "cuda") == 2
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("16GiB", 16 << 30),
        ("16G", 16 << 30),
        ("1.5 MiB", 3 << 19),
        ("2GB", 2_000_000_000),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes_are_written_as_people_do(text: str, num_bytes: int) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args(["--memory", text]).memory == num_bytes


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--memory", "much"),
        ("--memory", "-1GiB"),
        ("--memory", "1PiB"),
        ("--lengths", ""),
        ("--lengths", "1,,2"),
        ("--lengths", "0"),
        ("--lengths", "-5"),
        ("--lengths", ",".join(["1"] * 65)),
        ("--lengths", "9999999999"),
    ],
)
def test_what_is_no_size_and_no_length_is_refused_by_flag(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        inspect(f"{flag}={value}")
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("http://127.0.0.1:30000",), "session-server audit --url http://127.0.0.1:30000"),
        (("--page-size", "0"), "--page-size"),
        (("--memory", "1"), "inspect: --memory"),
        (("no/such/model/at/all",), "no such directory"),
        (
            ("--device", "cuda", "--memory", "1GiB", "--quantize", "int8"),
            "--quantize int8 needs the native kernels",
        ),
        (("--context-length", "5000"), "--context-length 5000 exceeds the 4096 tokens"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(
    words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect(*words) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.startswith("session-server inspect: ")


def test_what_serve_would_refuse_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert inspect(str(checkpoint)) == 2
        return capsys.readouterr().err

    gain, up = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    rewrite(checkpoint, gain, torch.ones(7))
    assert f"wrong shapes: {gain} is [7] and should be [48]" in said()
    rewrite(checkpoint, up, None)
    assert f"missing tensors: {up}" in said()
    rewrite(checkpoint, gain, torch.ones(48))
    path = checkpoint / "model.safetensors"
    save_file({**load_file(path), up: torch.ones(80, 48), "extra.weight": torch.ones(1)}, path)
    assert "unexpected tensors: extra.weight" in said()
    path.write_bytes(path.read_bytes()[:-1])
    assert "model.safetensors cannot be read" in said()
    (checkpoint / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in said()
    (checkpoint / "config.json").write_text('{"model_type": "gpt9"}')
    assert "model_type 'gpt9' is not implemented; known: " in said()


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((0,), "0"),
        ((0, 1, 2), "0-2"),
        ((0, 2, 3, 5), "0, 2-3, 5"),
        ((1, 3, 5, 7), "1, 3 ... 7"),
        ((0, 1, 3, 4, 6, 7, 9, 10), "0-1, 3-4 ... 9-10"),
    ],
)
def test_layers_are_said_shortly(layers: tuple[int, ...], words: str) -> None:
    assert command.layer_ranges(layers) == words
