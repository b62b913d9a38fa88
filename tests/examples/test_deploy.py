"""The files for deploying name flags, variables, ports and paths that there are."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from session_server.config import Settings
from session_server.deploy.options import (
    APPLICATION,
    ReplicaOptions,
    deployment_options,
    replica_count,
    replica_settings,
)
from session_server.flags import FLAGS
from session_server.sessions.store.places import default_directory
from session_server.sources import CONFIG_VARIABLE, PLACES, PREFIX, read_sources, variable_of
from session_server.web.app import ADMIN_ROUTERS, ROUTERS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples/deploy"
PORT = str(Settings().http.port)
KNOWN_FLAGS = {name for flag in FLAGS for name in flag.names} | {"--config"}
TEXTS = sorted(path for path in DEPLOY.iterdir() if path.suffix != ".json")


def read(name: str) -> str:
    return (DEPLOY / name).read_text("utf-8")


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(read("compose.yaml"))
    return loaded


def unit() -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read_string(read("session-server.service"))
    return parser


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_variable_and_flag_of_ours_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    known = {variable_of(place) for place in PLACES} | {CONFIG_VARIABLE}
    assert set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", text)) <= known
    of_server = re.findall(r"(?:serve|Settings|with) .*?(--[a-z-]+)", text)
    assert set(of_server) <= KNOWN_FLAGS | {"--build-arg"}


def test_the_settings_of_every_file_are_valid() -> None:
    assert read_sources({}, environment={}, file=DEPLOY / "server.toml").settings
    environment = {
        name: value.replace("${SITE:-localhost}", "a.example")
        for name, value in compose()["services"]["session-server"]["environment"].items()
    }
    http = read_sources({}, environment=environment, file=None).settings.http
    assert (str(http.port), http.host) == (PORT, "0.0.0.0")
    assert http.allowed_hosts == ("a.example", "session-server")


def test_ports_of_all_files_are_those_of_the_server() -> None:
    services = compose()["services"]
    assert services["session-server"]["expose"] == [PORT]
    assert services["caddy"]["environment"]["UPSTREAM"] == f"session-server:{PORT}"
    assert re.search(rf"^EXPOSE {PORT}$", read("Containerfile"), re.MULTILINE)
    assert f"127.0.0.1:{PORT}/health" in read("Containerfile")
    assert f"127.0.0.1:{PORT}" in read("Caddyfile")
    (scrape,) = yaml.safe_load(read("prometheus.yml"))["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [f"session-server:{PORT}"]}]


def test_files_that_are_copied_or_mounted_exist() -> None:
    services, made = compose()["services"], {"./keys", "./prometheus.key"}  # by its first lines
    mounts = [mount for each in services.values() for mount in each.get("volumes", ())]
    sources = {mount.partition(":")[0] for mount in mounts if mount.startswith(".")} - made
    assert all((DEPLOY / source).is_file() for source in sources)
    build = services["session-server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", read("Containerfile"), re.MULTILINE)
    names = {name for words in copied for name in words.split()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "cache", "session_server"}
    assert all((ROOT / name).exists() for name in names)


def test_supervisors_wait_for_a_drain() -> None:
    least = Settings().http.drain_s + 30  # ten of them for a store whose disk does not answer
    assert int(unit()["Service"]["TimeoutStopSec"]) >= least
    grace = compose()["services"]["session-server"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) >= least


def test_the_unit_starts_serve_with_flags_that_there_are() -> None:
    words = shlex.split(unit()["Service"]["ExecStart"])
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= KNOWN_FLAGS


def test_the_server_reads_the_file_in_which_keys_are_revoked() -> None:
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"])
    path = words[words.index("--api-key-file") + 1]
    # A credential of systemd is a copy that is made at the start.
    assert not {name for name in service if "Credential" in name}
    assert f"keys add NAME --file {path}\n" in read("session-server.service")
    # A mount or a secret of one file shows the one that was there when the container started.
    server = compose()["services"]["session-server"]
    path = server["environment"]["SESSION_SERVER_API_KEY_FILE"]
    (folder,) = (m for m in server["volumes"] if m.split(":")[1] == str(Path(path).parent))
    assert f"--file {folder.removeprefix('./').split(':')[0]}/{Path(path).name}\n" in read(
        "compose.yaml"
    )
    assert "secrets" not in server


def test_sessions_are_kept_where_they_outlive_the_server() -> None:
    service = unit()["Service"]
    folder = f"/var/lib/{service['StateDirectory']}"
    # The unit has several lines of variables, and a parser of it the last one.
    assert "XDG_STATE_HOME=/var/lib" in service["Environment"].split()
    assert default_directory({"XDG_STATE_HOME": "/var/lib"}, int(PORT)) == Path(
        f"{folder}/port-{PORT}"
    )
    found = re.search(r"XDG_STATE_HOME=(\S+)", read("Containerfile"))
    assert found is not None
    assert f"session-server -m 700 {found[1]}\n" in read("Containerfile")
    assert f"sessions:{found[1]}" in compose()["services"]["session-server"]["volumes"]
    assert "sessions" in compose()["volumes"]


def test_the_server_sees_how_much_memory_there_is() -> None:
    assert "ProcSubset" not in unit()["Service"], "it hides /proc/meminfo"


def test_a_health_check_is_kept_by_what_builds_the_image() -> None:
    assert "HEALTHCHECK" in read("Containerfile")
    assert "podman build --format docker" in read("Containerfile")
    assert "BUILDAH_FORMAT=docker podman compose" in read("compose.yaml")


def test_the_proxy_hides_the_routes_of_operators() -> None:
    hidden = re.search(r"@operators path (.+)", read("Caddyfile"))
    assert hidden is not None
    patterns = [re.escape(word).replace(r"\*", ".*") for word in hidden[1].split()]
    paths = {route.path for router in ADMIN_ROUTERS for route in router.routes}  # type: ignore[attr-defined]
    assert all(any(re.fullmatch(pattern, path) for pattern in patterns) for path in paths)
    others = {route.path for router in ROUTERS for route in router.routes} - paths  # type: ignore[attr-defined]
    assert not [path for path in others if any(re.fullmatch(p, path) for p in patterns)]


def test_workflows_and_templates_are_what_they_should_be() -> None:
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "classifiers"
    ]
    said = {each.rpartition(" ")[2] for each in classifiers if "Python :: 3." in each}
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    assert set(matrix["python"]) == said
    for path in (ROOT / ".github").rglob("*.yml"):
        assert yaml.safe_load(path.read_text("utf-8"))


def test_the_rayservice_names_what_there_is() -> None:
    service = yaml.safe_load(read("rayservice.yaml"))["spec"]
    told = yaml.safe_load(service["serveConfigV2"])
    (application,) = told["applications"]
    module, _, name = application["import_path"].partition(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8")  # it imports Ray
    assert f"\ndef {name}(args" in source
    assert all(f'"{argument}"' in source for argument in application["args"])
    assert application["name"] == APPLICATION
    count = replica_count(application["args"]["replicas"])
    (workers,) = service["rayClusterConfig"]["workerGroupSpecs"]
    assert (count.least, count.most) == (workers["minReplicas"], workers["maxReplicas"])
    assert str(told["http_options"]["port"]) == PORT
    templates = [workers["template"], service["rayClusterConfig"]["headGroupSpec"]["template"]]
    for template in (each["spec"] for each in templates):
        (container,) = template["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        settings = read_sources({}, environment=environment, file=None).settings
        options = ReplicaOptions(count, 4.0, 1.0)
        stop_s = deployment_options(replica_settings(settings, options), options)
        assert template["terminationGracePeriodSeconds"] > stop_s["graceful_shutdown_timeout_s"]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {str(Path(environment["SESSION_SERVER_API_KEY_FILE"]).parent), "/models"} == mounted
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in template["volumes"]
        }
