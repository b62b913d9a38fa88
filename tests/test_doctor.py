"""What the doctor says about machines that are well and machines that are not."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file, save_file

from session_server import doctor
from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.cli import main
from session_server.doctor import CheckStatus
from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import Served, served


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return parser.parse_args(argv)


class Gpu(NamedTuple):
    name: str = "NVIDIA H100 80GB HBM3"
    major: int = 9
    minor: int = 0
    total_memory: int = 80 << 30


def test_a_gpu_is_told_with_what_it_can_and_what_torch_was_built_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Gpu())
    monkeypatch.setattr("torch.version.cuda", "13.0")
    gpu, _ = doctor.check_gpu()
    said = "cuda:0 NVIDIA H100 80GB HBM3, compute capability 9.0, 80.0 GiB; torch "
    assert gpu.found == f"{said}{torch.__version__} for CUDA 13.0"
    monkeypatch.setattr("importlib.metadata.version", no_version)
    _, triton = doctor.check_gpu()
    assert triton.verdict is CheckStatus.WARNING
    assert "pip install 'session-server[gpu]'" in triton.found


def test_what_torch_needs_for_a_gpu_is_told_and_is_a_warning_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for place, verdict in ((tmp_path / "no", CheckStatus.GOOD), (tmp_path, CheckStatus.WARNING)):
        monkeypatch.setattr(doctor, "DRIVERS_GPUS", place)
        gpu, _ = doctor.check_gpu()
        assert gpu.verdict is verdict
        assert "sees no CUDA device: it needs a driver, and torch with CUDA: make" in gpu.found


def test_a_gpu_that_is_asked_for_and_not_there_is_wrong_and_the_rest_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.run(arguments("--json", "--port", "0", "--device", "cuda")) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    wrong = [of["topic"] for of in findings if of["verdict"] == "wrong"]
    assert wrong == ["device"]
    with pytest.raises(SystemExit):
        arguments("--device", "gpu")


def test_a_machine_that_can_serve_is_found_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(arguments("--json", "--port", "0")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    topics = {finding["topic"] for finding in report["findings"]}
    assert {"python", "packages", "device", "model", "tokenizer", "port", "disk"} <= topics


def test_an_address_of_another_machine_leads_to_the_flag_of_the_host() -> None:
    assert "--host" in doctor.check_port("192.0.2.7", 0).advice


def test_a_taken_port_is_wrong_and_the_advice_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert doctor.run(arguments("--port", str(port))) == 1
    assert "--port" in capsys.readouterr().out


@served()
async def test_a_port_of_a_session_server_is_told_to_be_that(this: Served[PaperEngine]) -> None:
    address = urlsplit(this.url)
    assert address.hostname
    assert address.port
    finding = await asyncio.to_thread(doctor.check_port, address.hostname, address.port)
    assert finding.verdict is CheckStatus.WRONG
    assert "a session-server answers there" in finding.found


def test_a_missing_package_is_wrong() -> None:
    def version_of(name: str) -> str:
        if name == "uvicorn":
            raise PackageNotFoundError(name)
        return "1.0"

    verdicts = {f.verdict: f.found for f in doctor.check_versions(version_of)}
    assert verdicts[CheckStatus.WRONG] == "missing: uvicorn"


def test_little_memory_is_a_warning() -> None:
    assert doctor.check_memory("cpu", 1 << 20).verdict is CheckStatus.WARNING
    assert doctor.check_memory("cpu", 1 << 40).verdict is CheckStatus.GOOD
    assert doctor.check_disk(0).verdict is CheckStatus.WARNING


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "no such file or directory"),
        ({}, "config.json"),
        ({"config.json": '{"model_type": "no_such_family"}'}, "no_such_family"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_named(
    tmp_path: Path, files: dict[str, str] | None, words: str
) -> None:
    directory = tmp_path / "model"
    if files is not None:
        directory.mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
    findings = list(doctor.check_model(directory))
    assert findings[0].verdict is CheckStatus.WRONG
    assert words in findings[0].found
    assert findings[0].advice


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_random_checkpoint(
        tmp_path, RandomModel(num_hidden_layers=1, max_position_embeddings=64)
    )


def test_a_missing_tensor_is_found_without_reading_any(checkpoint: Path) -> None:
    assert {finding.verdict for finding in doctor.check_model(checkpoint)} == {CheckStatus.GOOD}
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)
    model, tokenizer = doctor.check_model(checkpoint)
    assert model.verdict is CheckStatus.WRONG
    assert "missing tensors: model.norm.weight" in model.found
    assert tokenizer.verdict is CheckStatus.GOOD


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_serve_inspect_and_doctor_refuse_a_checkpoint_in_the_same_words(
    checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to("/dev/zero")
    reason = f"{checkpoint / name} is a link that leads out of the checkpoint's directory"
    for command in (["serve", "--model-path"], ["inspect"]):
        assert main([*command, str(checkpoint)]) == 2
        assert capsys.readouterr().err == f"session-server {command[0]}: {reason}\n"
    assert reason in {finding.found for finding in doctor.check_model(checkpoint)}
