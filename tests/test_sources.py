"""Where settings come from: a file, variables and flags, each named when it is wrong."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from session_server import cli, serving
from session_server.config import Settings
from session_server.flags import FLAGS, Given
from session_server.sources import (
    KEY_PLACE,
    MAX_CONFIG_BYTES,
    PLACES,
    Sourced,
    _from_environment,
    read_sources,
    shown_settings,
    variable_of,
)

PORT = ("http", "port")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "server.toml"


def read(file: Path | None = None, text: str = "", **environment: str) -> Sourced:
    if file is not None:
        file.write_text(text, "utf-8")
    return read_sources({}, environment=environment, file=file)


def serve(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "session_server", "serve", *words]
    variables = os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_without_any_source_there_are_the_defaults() -> None:
    assert read().settings == Settings()
    assert read(HOME="/root", SESSION_SERVER_API_KEY="k").settings == Settings()


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(file: Path) -> None:
    text = "[http]\nport = 1\nhost = '::1'\ndrain_s = 3\n"
    sourced = read(file, text)
    assert (sourced.settings.http.port, sourced.origins[PORT]) == (1, str(file))
    variables = {"SESSION_SERVER_HTTP__PORT": "2", "SESSION_SERVER_HTTP__HOST": "::2"}
    sourced = read(file, text, **variables)
    assert (sourced.settings.http.port, sourced.origins[PORT]) == (2, "SESSION_SERVER_HTTP__PORT")
    flags = {PORT: Given("3", "--port", "--port")}
    sourced = read_sources(flags, environment=variables, file=file)
    assert (sourced.settings.http.port, sourced.origins[PORT]) == (3, "--port")
    assert (sourced.settings.http.host, sourced.settings.http.drain_s) == ("::2", 3.0)
    assert ("http", "log_level") not in sourced.origins


@pytest.mark.parametrize("place", PLACES)
def test_every_setting_but_the_key_has_a_variable_of_its_own(place: tuple[str, str]) -> None:
    if place == KEY_PLACE:  # it counts beside others, which `wiring` sees to
        return
    name = variable_of(place)
    assert dict(_from_environment({name: "5"})) == {place: Given("5", name, name)}


def test_a_file_and_a_variable_take_sizes_as_flags_do(file: Path) -> None:
    assert read(SESSION_SERVER_CACHE__HOST_KV_BYTES="2GiB").settings.cache.host_kv_bytes == 2 << 30
    for text in ("'512MiB'", str(512 << 20)):
        found = read(file, f"[cache]\ndisk_kv_bytes = {text}\n").settings
        assert found.cache.disk_kv_bytes == 512 << 20
    with pytest.raises(ValueError, match=re.escape("expected 0 to 1024TiB, in bytes, or a size")):
        read(file, "[cache]\ndisk_kv_bytes = 'much'\n")


def test_names_of_hosts_are_separated_by_commas_in_a_variable(file: Path) -> None:
    hosts = read(SESSION_SERVER_HTTP__ALLOWED_HOSTS="a.example, b.example").settings.http
    assert hosts.allowed_hosts == ("a.example", "b.example")
    assert read(file, "[http]\nallowed_hosts = ['a', 'b']").settings.http.allowed_hosts == (
        ("a", "b")
    )


def test_a_variable_may_name_the_file(file: Path) -> None:
    file.write_text("[http]\nport = 9", "utf-8")
    assert read(SESSION_SERVER_CONFIG=str(file)).settings.http.port == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[http]\nport = 65536", "http.port: expected 0 to 65535, got 65536"),
        ("[http]\ndrain-timeout = 1", "there is no http.drain-timeout; did you mean http.drain_s?"),
        ("[http]\npage_size = 1", "there is no http.page_size; did you mean cache.page_size?"),
        ("[htp]\n", "there is no section [htp]; did you mean [http]?"),
        ("port = 1", "there is no section [port]; did you mean http.port?"),
        ("[http\n", "is not TOML"),
        (f"[http]\nport = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        ("[model]\ndtype = 'int3'", "model.dtype: expected 'auto'"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_with_the_nearest_match(
    file: Path, text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read(file, text)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HTTP__PORT", "x", "SESSION_SERVER_HTTP__PORT: expected 0 to 65535, got 'x'"),
        ("HTTP__PORT", "", "SESSION_SERVER_HTTP__PORT is empty"),
        ("HTTP__PRT", "1", "no variable SESSION_SERVER_HTTP__PRT; did you mean SESSION_SERVER_HTT"),
        ("HTTP", "{}", "there is no variable SESSION_SERVER_HTTP"),
        ("HTTP__PORT__X", "1", "there is no variable SESSION_SERVER_HTTP__PORT__X"),
        ("API_KEY_FILE", "", "SESSION_SERVER_API_KEY_FILE is empty"),
    ],
)
def test_what_is_wrong_with_a_variable_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(**{f"SESSION_SERVER_{name}": value})


@pytest.mark.parametrize("place", [("sessions", "store"), ("model", "path"), PORT])
def test_an_empty_flag_is_a_variable_of_a_shell_that_was_not_set(
    file: Path, place: tuple[str, str]
) -> None:
    with pytest.raises(ValueError, match=re.escape("--name is empty: leave it out")):
        read_sources({place: Given("", "--name", "--name")}, environment={}, file=None)
    part, name = place
    with pytest.raises(ValueError, match=re.escape(f"{file}: {part}.{name} is empty")):
        read(file, f"[{part}]\n{name} = ''\n")


SERVICE = {
    "SERVICE_HOST": "10.0.0.11",
    "SERVICE_PORT": "80",
    "SERVICE_PORT_HTTP": "80",
    "PORT": "tcp://10.0.0.11:80",
    "PORT_80_TCP": "tcp://10.0.0.11:80",
    "PORT_80_TCP_PROTO": "tcp",
    "PORT_80_TCP_PORT": "80",
    "PORT_80_TCP_ADDR": "10.0.0.11",
}
"""What Kubernetes tells every pod of a service."""


@pytest.mark.parametrize("service", ["", "METRICS_"])
def test_a_service_of_kubernetes_may_have_our_name(service: str) -> None:
    told = {f"SESSION_SERVER_{service}{name}": value for name, value in SERVICE.items()}
    assert read(**told).settings == Settings()
    assert read(**told).origins == {}


def test_a_port_that_is_no_url_is_a_variable_with_a_wrong_name() -> None:
    with pytest.raises(ValueError, match="did you mean SESSION_SERVER_HTTP__PORT"):
        read(SESSION_SERVER_PORT="8000")


def test_a_variable_has_its_name_in_capitals() -> None:
    """Another program's, of another case, is none of ours, whatever is in it."""
    others = {"session_server_http": '{"port": 7}', "session_server_http__port": "x"}
    assert read(**others).settings == Settings()


def test_a_file_that_cannot_be_read_or_is_too_large_is_refused(file: Path) -> None:
    for path in (file, file.parent):
        with pytest.raises(ValueError, match="cannot read"):
            read_sources({}, environment={}, file=path)
    for num_bytes in (MAX_CONFIG_BYTES - 1, MAX_CONFIG_BYTES):
        assert read(file, "#" * num_bytes).settings == Settings()
    with pytest.raises(ValueError, match=f"more than {MAX_CONFIG_BYTES}"):
        read(file, "#" * (MAX_CONFIG_BYTES + 1))


def test_a_wrong_key_is_not_shown(file: Path) -> None:
    with pytest.raises(ValueError, match="api_key") as caught:
        read(file, "[http]\napi_key = 1234567")
    assert "1234567" not in str(caught.value)


def test_the_address_of_a_collector_may_hold_a_key_and_is_not_shown(file: Path) -> None:
    address = "https://me:a-canary-key@collector/v1/traces?key=a-canary-key"
    sourced = read(file, f"[http]\notlp_traces_endpoint = '{address}'")
    endpoint = sourced.settings.http.otlp_traces_endpoint
    assert endpoint is not None
    assert endpoint.get_secret_value() == address
    assert "a-canary-key" not in shown_settings(sourced, has_variable_key=False)
    for wrong in (f"ftp{address}", "https://" + "a-canary-key" * 200):
        with pytest.raises(ValueError, match="otlp_traces_endpoint: expected http://") as caught:
            read(file, f"[http]\notlp_traces_endpoint = '{wrong}'")
        assert "a-canary-key" not in str(caught.value)


@pytest.mark.parametrize(("num_chars", "is_taken"), [(2047, True), (2048, True), (2049, False)])
def test_the_address_of_a_collector_is_as_long_as_it_may(
    file: Path, num_chars: int, is_taken: bool
) -> None:
    text = f"[http]\notlp_traces_endpoint = '{'http://'.ljust(num_chars, 'x')}'"
    with contextlib.nullcontext() if is_taken else pytest.raises(ValueError, match="at most 2048"):
        read(file, text)


def test_what_is_shown_is_a_file_that_gives_the_same(file: Path) -> None:
    text = (
        "[http]\nallowed_hosts = ['a\"b']\nport = 7\nresponses_ws = false\n[cache]\npage_size = 4"
    )
    sourced = read(file, text)
    shown = shown_settings(sourced, has_variable_key=True)
    assert f"port = 7  # {file}" in shown
    assert "SESSION_SERVER_API_KEY is set" in shown
    assert set(tomllib.loads(shown)) == set(Settings.model_fields)
    num_settings = len({(flag.part, flag.field) for flag in FLAGS})
    assert len([line for line in shown.splitlines() if line[:1] not in {"", "["}]) == (
        num_settings + 1
    )
    again = read(file, shown)
    assert again.settings == sourced.settings


def test_the_command_shows_settings_and_no_key(file: Path) -> None:
    file.write_text("[http]\napi_key = 'a-canary-key'", "utf-8")
    file.chmod(0o644)
    done = serve("--config", str(file), "--print-config", SESSION_SERVER_HTTP__PORT="7")
    assert done.returncode == 0
    assert "port = 7  # SESSION_SERVER_HTTP__PORT" in done.stdout
    assert "a-canary-key" not in done.stdout + done.stderr
    assert f"can read the key in {file}" in done.stderr
    file.chmod(0o600)
    assert serve("--config", str(file), "--print-config").stderr == ""


def test_a_key_on_the_command_line_is_warned_of() -> None:
    assert "--api-key with ps" in serve("--api-key", "k" * 16, "--print-config").stderr


@pytest.mark.parametrize(
    "wrong",
    [
        ("http.tenant_limits", "x=1", "{name}: 'x=1' is no limit"),
        ("http.admin_host", "::1", "{name} ::1 has no port"),
        ("http.host", "0.0.0.0", "{name} 0.0.0.0 without a key would serve"),
        ("http.ssl_keyfile", "key.pem", "{name} without --ssl-certfile has no certificate"),
        ("http.api_key", "", "{name}: the key is empty"),
        ("model.context_length", "4194304", "{name} 4194304 exceeds the"),
    ],
)
def test_what_is_found_wrong_later_is_named_as_it_was_given(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: tuple[str, str, str],
) -> None:
    monkeypatch.setattr(serving, "configure_logging", lambda *_, **__: None)
    key, value, told = wrong
    part, _, name = key.partition(".")
    file.write_text(f"[{part}]\n{name} = {value if value.isdigit() else repr(value)}\n", "utf-8")
    flag = next(flag.names[0] for flag in FLAGS if (flag.part, flag.field) == (part, name))
    for given, words in ((flag, [flag, value]), (f"{file}: {key}", ["--config", str(file)])):
        assert cli.main(["serve", *words]) == 2
        assert told.format(name=given) in capsys.readouterr().err
    if key != "http.api_key":  # its variable is told of by itself
        monkeypatch.setenv(variable := variable_of((part, name)), value)
        assert cli.main(["serve"]) == 2
        assert told.format(name=variable) in capsys.readouterr().err


def test_what_the_engine_finds_wrong_is_named_as_it_was_given() -> None:
    done = serve(SESSION_SERVER_ENGINE__SPECULATION="model", SESSION_SERVER_HTTP__PORT="0")
    told = "SESSION_SERVER_ENGINE__SPECULATION model needs --speculative-draft-model-path"
    assert (done.returncode, told in done.stderr) == (2, True)


def test_a_wrong_variable_ends_the_command_with_status_two() -> None:
    done = serve(SESSION_SERVER_HTTP__PORT="70000")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SESSION_SERVER_HTTP__PORT: expected 0 to 65535" in done.stderr
