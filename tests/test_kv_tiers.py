"""What a server keeps outside of its pools, as its settings say."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Final, cast

import pytest

from session_server.config import (
    CacheOptions,
    ModelOptions,
    SessionOptions,
    Settings,
    model_directory,
)
from session_server.engine_wiring import build_engine
from session_server.kv_tiers import layout_of, make_tiers
from session_server.models.checkpoint_files import CheckpointFiles
from session_server.runner import loader, native
from session_server.runner.capacity import MemoryLimits
from session_server.runner.loader import LoadedRunner, RunnerOptions, load_runner
from session_server.runner.segment_format import Layout

DEMO_MODEL: Final = model_directory(ModelOptions())


def test_a_disk_without_a_store_has_no_effect_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = Settings(
        cache=CacheOptions(host_kv_bytes=0, disk_kv_bytes=1 << 30),
        sessions=SessionOptions(store="none"),
    )
    with caplog.at_level(logging.WARNING, "session_server.engine"):
        tiers = make_tiers(settings, cast("LoadedRunner", None), "fingerprint")
    assert tiers.policy.disk_bytes == 0
    assert "--store" in caplog.text


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"disk_kv_bytes": 1 << 30}, "--disk-kv-bytes"),
        ({"host_kv_bytes": 1 << 20}, "--host-kv-bytes"),
    ],
)
def test_copies_of_several_ranks_are_refused(sizes: dict[str, int], flag: str) -> None:
    model = ModelOptions(tensor_parallel_size=2)
    with pytest.raises(ValueError, match=f"^--tensor-parallel-size 2: .*leave out {flag}$"):
        build_engine(Settings(model=model, cache=CacheOptions(**sizes)))


def test_several_ranks_keep_no_copies_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(model=ModelOptions(tensor_parallel_size=2))
    with caplog.at_level(logging.INFO, "session_server.engine"):
        tiers = make_tiers(settings, cast("LoadedRunner", None), "fingerprint")
    assert tiers.policy.host_bytes == 0
    assert "--tensor-parallel-size" in caplog.text


def layout(directory: Path = DEMO_MODEL, fingerprint: str = "model", **options: Any) -> Layout:
    """What the files of a model's KV must agree on."""
    options = {"page_size": 16, "num_rows": 4, "dtype": "float32"} | options
    return layout_of(load_runner(directory, RunnerOptions(**options)), fingerprint)


def with_config(directory: Path, **fields: object) -> Path:
    """The demo model with other fields in its configuration, and the same weights."""
    shutil.copytree(DEMO_MODEL, directory)
    config = json.loads((directory / "config.json").read_text("utf-8"))
    (directory / "config.json").write_text(json.dumps(config | fields), "utf-8")
    return directory


class TestWhatKvIsOf:
    @pytest.mark.skipif(not native.is_available(), reason="codes need the native kernels")
    @pytest.mark.parametrize("is_roomy", [True, False])
    def test_weights_as_they_are_computed_with_and_no_measurement_of_them(
        self, is_roomy: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        layouts = {quantize: layout(quantize=quantize) for quantize in ("none", "int8", "int4")}
        assert len({each.fingerprint for each in layouts.values()}) == 3
        monkeypatch.setattr(loader, "_fits_besides", lambda *_: is_roomy)
        for quantize, before in layouts.items():
            assert layout(quantize=quantize) == before

    def test_whatever_changes_what_is_computed(self, tmp_path: Path) -> None:
        scaled = {"rope_type": "linear", "factor": 2.0}
        window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
        layouts = [
            layout(),
            layout(fingerprint="other"),
            layout(page_size=32),
            layout(dtype="bfloat16"),
            layout(kv_dtype="float16", dtype="bfloat16"),
            layout(draft=DEMO_MODEL),
            layout(with_config(tmp_path / "scaled", rope_scaling=scaled)),
            layout(with_config(tmp_path / "window", **window)),
        ]
        assert len({each.fingerprint for each in layouts}) == len(layouts)

    @pytest.mark.parametrize(
        "options",
        [
            {"num_threads": 1},
            {"num_rows": 2},
            {"backend": "cpu"},
            {"max_context_len": 128},
            {"memory": MemoryLimits(max_total_tokens=512)},
            {"eos_token_ids": (5,)},
        ],
    )
    def test_and_nothing_else(self, options: dict[str, Any]) -> None:
        assert layout(**options) == layout()


@pytest.mark.parametrize("disk_kv_bytes", [0, 1 << 30])
def test_a_checkpoint_is_read_as_a_whole_only_if_kv_goes_to_disk(
    disk_kv_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(CheckpointFiles, "digest", lambda files: read.append(files) or "digest")
    settings = Settings(
        model=ModelOptions(path=str(DEMO_MODEL)),
        cache=CacheOptions(disk_kv_bytes=disk_kv_bytes, max_total_tokens=1024),
        sessions=SessionOptions(store=tmp_path),
    )
    build_engine(settings)
    assert bool(read) is bool(disk_kv_bytes)
