"""A PostgreSQL of its own for tests, from the binaries that are installed."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

REQUIRED: Final = "REQUIRE_POSTGRES"
"""Whether tests that need PostgreSQL fail where there is none: they are skipped otherwise."""

_START_S: Final = 60.0
_DEBIAN: Final = Path("/usr/lib/postgresql")
_SETTINGS: Final = {
    "listen_addresses": "",
    "max_connections": "200",
    "deadlock_timeout": "200ms",
    "timezone": "UTC",
    "lc_messages": "C",
}


def binaries() -> Path | None:
    """Return where PostgreSQL is installed, the newest one; None if it is not."""
    found = shutil.which("initdb")
    installed = sorted(_DEBIAN.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    path = Path(found).resolve() if found else next(reversed(installed), None)
    return None if path is None else path.parent


def find_or_skip() -> Path:
    """Return where PostgreSQL is installed, or skip the test."""
    found = binaries()
    if found is None:
        report = pytest.fail if os.environ.get(REQUIRED) == "1" else pytest.skip
        report("no PostgreSQL is installed: apt-get install postgresql")
    return found


class Postgres:
    """Run a server on a Unix socket in a temporary directory. With one that `is_synced` its disk
    has what was committed."""

    def __init__(self, programs: Path, *, is_synced: bool = True) -> None:
        self._programs = programs
        self._directory = Path(tempfile.mkdtemp(prefix="pg-"))
        self._numbers = itertools.count(1)
        self._settings = _SETTINGS | {"fsync": "on" if is_synced else "off"}
        self._process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:  # it refuses to run as root
            who = _somebody()
            os.chown(self._directory, who.pw_uid, who.pw_gid)
            self._user = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        initdb = (
            *(str(programs / "initdb"), "-D", str(self._data), "-U", "postgres"),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
        )
        try:
            subprocess.run(initdb, check=True, capture_output=True, cwd="/", **self._user)
        except BaseException:
            shutil.rmtree(self._directory)
            raise

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    def url(self, name: str = "postgres") -> str:
        """Return the URL of a database."""
        return f"postgresql://postgres@/{name}?host={self._directory}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                (self._programs / "postgres", "-D", self._data, "-k", self._directory, *settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C ends the test, and this with it
                **self._user,
            )
        until_s = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.url()).close()
                return
            except psycopg.OperationalError:
                ended = self._process.poll() is not None
                if ended or time.monotonic() > until_s:
                    raise AssertionError((self._directory / "log").read_text()) from None
            time.sleep(0.02)

    def kill(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End it: at once, as a crash does, or with SIGINT once its transactions are undone."""
        if self._process is None:
            return
        self._process.send_signal(how)
        try:
            self._process.wait(_START_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process = None

    def new_database(self, template: str = "template1", *options: str) -> str:
        """Make a database, and return its URL."""
        name = f"test_{next(self._numbers)}"
        self.run(f"CREATE DATABASE {name} TEMPLATE {template} {' '.join(options)}")
        return self.url(name)

    def run(self, statement: str, url: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement as the superuser, and return what it has found."""
        options = "-c synchronous_commit=local"  # where it is told to wait for others
        with psycopg.connect(url or self.url(), autocommit=True, options=options) as connection:
            found = connection.execute(statement)
            return found.fetchall() if found.description else []

    def empty(self, url: str) -> None:
        """Drop all that is in a database, whoever uses it: much sooner done than to make one."""
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self.run(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity"
            f" WHERE datname = '{name}'"
        )
        self.run(f"ALTER DATABASE {name} RESET ALL")
        self.run("DROP SCHEMA IF EXISTS session_server CASCADE", url)
        used = "SELECT count(*) FROM pg_class WHERE oid >= 16384"
        assert self.run(used, url) == [(0,)], "a test has used another schema"

    def drop(self, url: str) -> None:
        """Drop a database, whoever uses it."""
        name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
        self.run(f"DROP DATABASE {name} WITH (FORCE)")

    def remove(self) -> None:
        """End it, and delete what it had."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.kill(signal.SIGINT)
        shutil.rmtree(self._directory)


@contextlib.contextmanager
def running(*, is_synced: bool = True) -> Iterator[Postgres]:
    """Run a server meanwhile, or skip the test."""
    server = Postgres(find_or_skip(), is_synced=is_synced)
    try:
        server.start()
        yield server
    finally:
        server.remove()


def _somebody() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise AssertionError("there is no user whom PostgreSQL may run as")
