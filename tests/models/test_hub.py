"""Finding a model, and naming it."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from session_server.models.errors import ModelNotFound
from session_server.models.hub import resolve_model


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


@pytest.mark.parametrize("path", ["/nowhere/model.gguf", "nowhere/model.GGUF"])
def test_a_gguf_file_that_does_not_exist_is_not_looked_for_on_the_hub(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    with pytest.raises(ModelNotFound, match="no such file"):
        resolve_model(path)


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
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_tensor("output.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_taken_as_it_is(gguf_file: Path) -> None:
    assert resolve_model(str(gguf_file)) == gguf_file


def test_a_directory_of_gguf_files_says_which_to_give(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"give one of the files: model.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
