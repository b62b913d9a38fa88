"""Every byte of a checkpoint is in its digest, wherever it lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from session_server.models import checkpoint_files
from session_server.models.checkpoint_files import CheckpointFiles
from session_server.models.errors import CheckpointError

SIZE = 3 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-1.safetensors").write_bytes(bytes(SIZE))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(SIZE + 7))
    return tmp_path


def digest(path: Path) -> str:
    return CheckpointFiles(path).digest()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_file_changes_the_digest(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_text("{ }")
    assert digest(model) != before


@pytest.mark.parametrize("at", [0, SIZE // 3, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("piece_bytes", [1 << 16, 100_003, 64 << 20])
def test_weights_that_differ_anywhere_have_another_digest(
    model: Path, at: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", piece_bytes)
    before = digest(model)
    assert digest(model) == before
    for path in sorted(model.glob("*.safetensors")):
        content = bytearray(path.read_bytes())
        content[at] = 1
        path.write_bytes(content)
        assert digest(model) != before
        content[at] = 0
        path.write_bytes(content)
        assert digest(model) == before


def test_files_that_are_parted_otherwise_have_another_digest(model: Path) -> None:
    before = digest(model)
    for name, size in (("model-1", SIZE + 7), ("model-2", SIZE)):
        (model / f"{name}.safetensors").write_bytes(bytes(size))
    assert digest(model) != before


def test_what_a_directory_or_a_gguf_file_is_called_has_no_part_in_it(
    model: Path, tmp_path: Path
) -> None:
    before = digest(model)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in list(model.glob("*.*")):
        (copy / path.name).write_bytes(path.read_bytes())
    assert digest(copy) == before
    one = tmp_path / "one.gguf"
    one.write_bytes(bytes(SIZE))
    before = digest(one)
    assert digest(one.rename(one.with_name("other.gguf"))) == before


def swapped(path: Path) -> None:
    """Another file of the same size lies in its place."""
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    new.rename(path)


@pytest.mark.parametrize("change", [swapped, Path.unlink, lambda p: p.write_bytes(b"")])
def test_files_that_change_while_a_model_is_loaded_are_an_error(
    model: Path, change: Callable[[Path], object]
) -> None:
    files = CheckpointFiles(model)
    files.digest()
    change(model / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"was changed|cannot be read"):
        files.digest()
