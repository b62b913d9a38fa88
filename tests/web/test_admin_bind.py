"""A bind of their own for operators: their routes answer there, and nowhere else."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from fastapi.routing import APIRoute

from session_server.local_server import LocalServer
from session_server.web.app import ADMIN_ROUTERS, PUBLIC_ROUTERS
from tests.rig.echo_server import PROGRAM

KEY = "a-key-of-sixteen-chars"


@dataclass
class Binds:
    """A server process with two binds."""

    process: LocalServer
    admin_url: str
    lines: list[str]


@pytest.fixture(scope="module")
def binds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Binds]:
    keys, lines = tmp_path_factory.mktemp("keys") / "keys", list[str]()
    keys.write_text(f"{KEY} admin=1\n", "utf-8")
    keys.chmod(0o600)
    flags = ["--admin-port", "0", "--api-key-file", str(keys)]
    with LocalServer(flags, program=PROGRAM, on_line=lines.append) as process:
        (admin,) = (line for line in lines if line.startswith("for operators: "))
        yield Binds(process, admin.rpartition(" ")[2], lines)
        assert process.stop() == 0


def admin_routes() -> list[tuple[str, str]]:
    return [
        (method, route.path)
        for router in ADMIN_ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    ]


def test_every_route_about_everybody_is_an_operators() -> None:
    about_all = {path for _, path in admin_routes()}
    assert {"/metrics", "/v1/admin/memory", "/flush_cache", "/dashboard"} <= about_all
    others = {
        route.path
        for router in PUBLIC_ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
    }
    assert not [path for path in others if path.startswith("/v1/admin") or path in about_all]


@pytest.mark.parametrize(("method", "path"), admin_routes())
def test_a_route_of_operators_is_unknown_on_the_public_bind(
    binds: Binds, method: str, path: str
) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    hidden = httpx.request(method, binds.process.url + path, headers=key)
    assert hidden.status_code == 404
    assert "/v1/admin" not in hidden.text
    with httpx.stream(method, binds.admin_url + path, headers=key) as answered:  # one has no end
        assert answered.status_code not in {401, 404, 405}
    if path != "/dashboard":  # a page, which asks for the key by itself
        assert httpx.request(method, binds.admin_url + path).status_code == 401


def test_a_bind_lists_the_paths_that_it_serves(binds: Binds) -> None:
    hidden = {"dashboard", "metrics", "memory", "all_sessions"}
    public, operators = (httpx.get(url).json() for url in (binds.process.url, binds.admin_url))
    assert operators.keys() - public.keys() == hidden
    assert public.items() < operators.items()


def test_both_binds_are_of_one_server(binds: Binds) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    opened = httpx.post(f"{binds.process.url}/v1/sessions", json={}, headers=key).json()
    found = httpx.get(f"{binds.admin_url}/v1/sessions/{opened['id']}", headers=key)
    assert found.status_code == 200
    for url in (binds.admin_url, binds.process.url):
        assert httpx.get(f"{url}/ready").json()["status"] == "ready"


@pytest.mark.parametrize("flag", ["--port", "--admin-port"])
def test_a_port_in_use_is_named_by_its_flag(flag: str) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        ports = {"--port": "0", "--admin-port": "0", flag: str(taken.getsockname()[1])}
        words = [word for each in ports.items() for word in each]
        done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pass another {flag} (0: any free port)" in done.stderr


def test_the_admin_bind_needs_a_key_too_where_others_can_connect() -> None:
    words = ["serve", "--admin-host", "0.0.0.0", "--admin-port", "0"]
    command = [sys.executable, "-m", "session_server", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--admin-host 0.0.0.0 without a key" in done.stderr
