"""Loading takes the memory of the weights and of one shard, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from session_server.bench.checkpoint import RandomModel, write_random_checkpoint
from session_server.runner.checkpoint import MAX_MAPPED_BYTES
from session_server.runner.loader import RunnerOptions
from session_server.runner.paged_decoder import ComputeBackend
from session_server.runner.survey import survey
from tests.depth import at_depth
from tests.oracle.checkpoints import write_checkpoint
from tests.oracle.gguf_files import write_gguf
from tests.oracle.test_packed import triton_only

SHAPE = RandomModel(
    hidden_size=512,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1536,
)
SHARD_BYTES = 37 << 20

MEASURE = """
import sys
from pathlib import Path
import torch
from session_server.models.registry import load_config
from session_server.runner.loader import layer_factories
from session_server.runner.weights import load_decoder

def load(directory):
    return load_decoder(
        Path(directory),
        load_config(Path(directory)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        factories=layer_factories(sys.argv[3], "float32"),
    )

def kib(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

torch.set_num_threads(1)
load(sys.argv[1])  # what the libraries need the first time
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = kib("VmRSS")
decoder = load(sys.argv[2])
print(kib("VmHWM") - before, kib("VmRSS") - before)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("whole"), SHAPE)


def loaded_bytes(directory: Path, small: Path, backend: ComputeBackend = "cpu") -> tuple[int, int]:
    """At the peak, and in the end."""
    if not small.exists():
        write_random_checkpoint(small, RandomModel(num_hidden_layers=1))
    words = [sys.executable, "-c", MEASURE, str(small), str(directory), backend]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    peak, rest = (int(word) << 10 for word in done.stdout.split())
    return peak, rest


def weight_bytes(directory: Path, backend: ComputeBackend = "cpu") -> int:
    options = RunnerOptions(page_size=16, num_rows=1, device="cpu", backend=backend)
    return survey(directory, options).weight_bytes


def split(whole: Path, directory: Path) -> list[Path]:
    """The same checkpoint in shards that are filled in the order of the layers."""
    write_random_checkpoint(directory, SHAPE)
    (directory / "model.safetensors").unlink()
    tensors = load_file(whole / "model.safetensors")

    def place(name: str) -> tuple[int, str]:
        words = name.split(".")
        return (int(words[2]) if words[1] == "layers" else -1, name)

    shards: list[dict[str, int]] = [{}]
    for name in sorted(tensors, key=place):
        if sum(shards[-1].values()) + tensors[name].nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensors[name].nbytes
    index, paths = {}, []
    for number, names in enumerate(shards):
        path = directory / f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, path)
        index.update(dict.fromkeys(names, path.name))
        paths.append(path)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return paths


def test_shards_take_no_more_than_the_weights_and_one_of_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    shards = split(checkpoint, tmp_path / "shards")
    assert len(shards) >= 4
    weights = weight_bytes(tmp_path / "shards")
    peak, rest = loaded_bytes(tmp_path / "shards", tmp_path / "small")
    assert weights < peak <= weights + max(path.stat().st_size for path in shards)
    assert rest <= weights * 1.03, "nothing that was freed is kept"


def test_a_large_file_is_not_held_whole(checkpoint: Path, tmp_path: Path) -> None:
    weights = weight_bytes(checkpoint)
    assert weights > 2 * MAX_MAPPED_BYTES
    peak, rest = loaded_bytes(checkpoint, tmp_path / "small")
    assert weights < peak <= weights + MAX_MAPPED_BYTES
    assert rest <= weights * 1.03


@pytest.mark.parametrize(
    "kind",
    at_depth([Type.F16, Type.Q6_K], proof=[Type.F16, Type.Q8_0, Type.Q4_0, Type.Q6_K]),
    ids=lambda k: k.name,
)
def test_a_gguf_file_takes_the_memory_of_its_weights_and_little_more(
    kind: Type, tmp_path: Path
) -> None:
    directory = write_random_checkpoint(tmp_path / "whole", SHAPE)
    path = write_gguf(directory, tmp_path / "model.gguf", lambda _: kind)
    weights = weight_bytes(path)
    peak, rest = loaded_bytes(path, tmp_path / "small")
    assert weights < peak < weights + (16 << 20)
    assert rest <= weights * 1.03


@triton_only
def test_experts_that_stay_codes_never_take_the_memory_of_their_numbers(tmp_path: Path) -> None:
    """One is read at a time, and packed beside those before it."""

    def write(name: str, num_experts: int) -> Path:
        sizes = {"num_hidden_layers": 1, "hidden_size": 256, "moe_intermediate_size": 256}
        sizes |= {"mlp_only_layers": [], "num_experts": num_experts}
        directory = write_checkpoint("qwen3_moe", tmp_path / name, **sizes)
        return write_gguf(directory, tmp_path / f"{name}.gguf", lambda _: Type.Q4_0)

    path = write("whole", 64)
    weights, as_numbers = weight_bytes(path, "triton"), weight_bytes(path)
    peak, rest = loaded_bytes(path, write("small", 3), "triton")
    assert weights < peak < weights + (16 << 20) < as_numbers // 2
    assert rest <= weights * 1.03 + (1 << 20)
