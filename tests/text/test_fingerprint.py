"""What a conversation goes on with is in the fingerprint of a model's text, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.text.local_text import load_local_text
from tests.text.tiny_models import write_model


def change_template(model: Path) -> None:
    template = model / "chat_template.jinja"
    written = template.read_text("utf-8")
    template.write_text(written.replace("<|im_end|>", "<|im_end|> ", 1), "utf-8")


def change_end(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))


def change_named_token(model: Path) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def change_tokenizer(model: Path) -> None:
    written = json.loads((model / "tokenizer.json").read_text("utf-8"))
    first, second = written["model"]["merges"][:2]
    written["model"]["merges"][:2] = second, first
    (model / "tokenizer.json").write_text(json.dumps(written), "utf-8")


def change_sampling(model: Path) -> None:
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "temperature": 0.5}))


def add_weights(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"other weights")
    (model / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (change_template, False),
        (change_end, False),
        (change_named_token, False),
        (change_tokenizer, False),
        (change_sampling, True),
        (add_weights, True),
    ],
)
def test_a_model_is_another_one_where_a_conversation_would_go_on_otherwise(
    tmp_path: Path, change: Callable[[Path], None], is_same: bool
) -> None:
    model = write_model(tmp_path / "model", "chatml")
    before = load_local_text(model).fingerprint
    assert load_local_text(model).fingerprint == before
    change(model)
    assert (load_local_text(model).fingerprint == before) is is_same
