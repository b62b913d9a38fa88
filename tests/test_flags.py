"""The flags of `serve`: SGLang's names, bounds on both sides, nothing ignored in silence."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest

from session_server import flags
from session_server.config import EngineMode, Settings
from session_server.engine.config import MemoryCheck


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add_arguments(parser)
    return parser.parse_args(words)


def test_no_flag_gives_the_defaults() -> None:
    assert flags.read_settings(parse()) == Settings()


def test_flags_of_sglang_fill_our_settings() -> None:
    words = (
        "--model-path m --page-size 4 --chunked-prefill-size 128 --context-length 512 "
        "--max-running-requests 8 --max-total-tokens 4096 --mem-fraction-static 0.5 "
        "--swa-full-tokens-ratio 0.25 "
        "--disable-overlap-schedule --attention-backend torch --dtype float32 --log-level error "
        "--kv-cache-dtype bfloat16 "
        "--served-model-name x --random-seed 7 --host 0.0.0.0 --port 1234 --api-key k"
    )
    settings = flags.read_settings(parse(*words.split()))
    assert settings.model.path == "m"
    assert settings.model.context_length == 512
    assert settings.model.kv_dtype == "bfloat16"
    assert settings.model.attention_backend == "torch"
    assert settings.model.random_seed == 7
    assert settings.cache.page_size == 4
    assert settings.cache.memory_fraction == 0.5
    assert settings.cache.max_total_tokens == 4096
    assert settings.cache.window_ratio == 0.25
    assert settings.engine.chunked_prefill_size == 128
    assert settings.engine.max_running_turns == 8
    assert not settings.engine.overlap
    assert settings.http.port == 1234
    assert settings.http.api_key is not None


def test_our_own_flags_fill_settings_too() -> None:
    settings = flags.read_settings(
        parse("--engine", "inline", "--memory-check", "strict", "--allowed-origin", "http://a")
    )
    assert settings.engine.mode is EngineMode.INLINE
    assert settings.cache.memory_check is MemoryCheck.STRICT
    assert settings.http.allowed_origins == ("http://a",)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--page-size", "0"),
        ("--page-size", "257"),
        ("--port", "65536"),
        ("--mem-fraction-static", "1"),
        ("--mem-fraction-static", "nan"),
        ("--max-running-requests", "many"),
        ("--dtype", "int3"),
        ("--kv-cache-dtype", "fp8"),
        ("--device", "tpu"),
        ("--session-ttl", "0"),
    ],
)
def test_a_value_out_of_bounds_names_its_flag(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        flags.read_settings(parse(name, value))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("--page-size", "0", "--page-size: expected 1 to 256, got '0'"),
        ("--page-size", "x", "--page-size: expected 1 to 256, got 'x'"),
        ("--dtype", "int3", "--dtype: expected 'auto'"),
        (
            "--host-kv-bytes",
            "1 PiB",
            "--host-kv-bytes: expected 0 to 16TiB, in bytes, or a size as 512MiB or 1GiB, "
            "got '1 PiB'",
        ),
        ("--replay-bytes", "1KiB", "--replay-bytes: expected 4KiB to 1GiB, in bytes"),
    ],
)
def test_a_value_out_of_bounds_is_told_the_bounds(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        flags.read_settings(parse(name, value))


def test_every_size_is_written_as_people_do() -> None:
    sizes = [flag for flag in flags.FLAGS if flag.field.endswith("_bytes")]
    assert len(sizes) == 6
    for flag in sizes:
        for text, num_bytes in {"64MiB": 1 << 26, "67108864": 1 << 26, "0.0625 G": 1 << 26}.items():
            settings = flags.read_settings(parse(flag.names[0], text))
            assert getattr(getattr(settings, flag.part), flag.field) == num_bytes
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    told = " ".join(parser.format_help().split())
    assert "--host-kv-bytes SIZE" in told
    assert "(default: 1GiB; 0 to 16TiB)" in told


def test_a_flag_that_means_nothing_here_is_accepted_and_named() -> None:
    args = parse("--log-requests", "--enable-streaming-session", "--schedule-policy", "lpm")
    assert flags.read_settings(args) == Settings()
    assert sorted(flags.ignored_flags(args)) == [
        "--enable-streaming-session",
        "--log-requests",
        "--schedule-policy",
    ]


@pytest.mark.parametrize(
    ("words", "largest"),
    [((), 64), (("--disable-cuda-graph",), 0), (("--cuda-graph-max-bs", "8"), 8)],
)
def test_graphs_are_captured_up_to_a_size_or_not_at_all(
    words: tuple[str, ...], largest: int
) -> None:
    assert flags.read_settings(parse(*words)).model.cuda_graph_max_bs == largest


def test_a_switch_says_what_it_does_or_which_flag_with_a_value_it_is() -> None:
    switches = [flag for flag in flags.FLAGS if flag.constant is not None]
    by_name = {flag.names[0]: flags.switch_text(flag, "overlap") for flag in switches}
    assert by_name["--disable-cuda-graph"] == "the same as `--cuda-graph-max-bs 0`"
    assert by_name["--disable-overlap-schedule"] == "do not overlap"
    assert by_name["--allow-open"] == "overlap"


@pytest.mark.parametrize("words", [["--no-such-flag"], ["--page-siz", "4"]])
def test_an_unknown_or_shortened_flag_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*words)


def test_help_lists_the_words_a_flag_takes() -> None:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    text = parser.format_help()
    for words in (
        "{process,inline}",
        "{off,warn,strict}",
        "{auto,native,cpu,torch,triton}",
        "{none,int8,int4}",
    ):
        assert words in text


def test_more_context_than_the_model_has_is_refused_with_both_numbers() -> None:
    words = ["-m", "session_server", "serve", "--port", "0", "--context-length", "100000"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--context-length 100000 exceeds the 4096 tokens of the model" in done.stderr


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    settings = {
        (part, name)
        for part, field in Settings.model_fields.items()
        for name in type(field.default).model_fields
    }
    assert {(flag.part, flag.field) for flag in flags.FLAGS} == settings
    # 40 before connections, input bytes and keys had bounds of their own to be set.
    # 59 before KV had a size in host memory and one on disk.
    # 61 before several servers could share a store, and a model could be split.
    # 63 before servers that share one had roles.
    # 64 before decode steps were captured.
    assert len(settings) <= 65, "the budget of settings"


def test_serve_warns_in_one_line_and_refuses_with_status_two() -> None:
    command = [sys.executable, "-m", "session_server", "serve"]
    words = ["--enable-mixed-chunk", "--model-path", "no/such/directory/here"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[0] == "warning: --enable-mixed-chunk has no effect here and is ignored"
    assert "no/such/directory/here" in lines[1]
    assert len(lines) == 2
