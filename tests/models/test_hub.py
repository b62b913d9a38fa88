"""Finding a model, and naming it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from session_server.models.errors import ModelNotFound
from session_server.models.hub import model_fingerprint, resolve_model


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelNotFound, match="give the directory"):
        resolve_model(str(file))


def test_a_path_that_does_not_exist_says_so() -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        resolve_model("/nowhere/at/all")


def test_without_a_hub_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="pass its directory"):
        resolve_model("nobody/has-this-model")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    return tmp_path


def test_a_fingerprint_is_stable_and_short(model: Path) -> None:
    assert model_fingerprint(model) == model_fingerprint(model)
    assert len(model_fingerprint(model)) == 16


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_changes_the_fingerprint(model: Path, name: str) -> None:
    before = model_fingerprint(model)
    (model / name).write_text("{ }")
    assert model_fingerprint(model) != before


def test_retrained_weights_of_the_same_shape_change_the_fingerprint(model: Path) -> None:
    before = model_fingerprint(model)
    weights = bytearray(5000)
    weights[4321] = 1
    (model / "model.safetensors").write_bytes(weights)
    assert model_fingerprint(model) != before


def test_the_directory_has_no_part_in_the_fingerprint(model: Path, tmp_path: Path) -> None:
    before = model_fingerprint(model)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in list(model.glob("*.*")):
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_fingerprint(copy) == before
