"""Hold the dashboard, the alerts and the metrics against Prometheus itself: `make observe`.

A Prometheus scrapes a server process that works, evaluates every rule, and answers every
expression of the dashboard. `promtool` judges the names of the metrics and the files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from session_server.local_server import LocalServer
from tests.observe import dashboard
from tests.observe.promql import DEPLOY
from tests.observe.work import work

PATIENCE_S = 60.0
FLAGS = ["--threads", "1", "--log-level", "warning", "--max-total-tokens", "65536"]
QUIET = {"Turns failed"}
"""Panels about what does not happen here."""


def promtool(*arguments: str, given: str | None = None) -> None:
    """Run one check; what it says is shown, and its failure ends everything."""
    said = subprocess.run(
        ["promtool", *arguments], input=given, text=True, capture_output=True, check=False
    )
    text = (said.stdout + said.stderr).strip()
    print(f"promtool {' '.join(arguments[:2])}: {text or 'nothing to say'}")
    if said.returncode:
        sys.exit(1)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def prometheus(target: str) -> Iterator[httpx.Client]:
    """A Prometheus with the files of the example, that scrapes `target` once a second."""
    with tempfile.TemporaryDirectory() as folder:
        text = (DEPLOY / "prometheus.yml").read_text("utf-8")
        text = text.replace("session-server:30000", target).replace("15s", "1s")
        (Path(folder) / "prometheus.yml").write_text(text, "utf-8")
        shutil.copy(DEPLOY / "prometheus-alerts.yml", folder)
        address = f"127.0.0.1:{free_port()}"
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
            "--log.level=error",
        ]
        process = subprocess.Popen(command)
        try:
            with httpx.Client(base_url=f"http://{address}", trust_env=False) as http:
                yield http
        finally:
            process.terminate()
            process.wait()


def ask(http: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers to one expression."""
    expression = expression.replace("$__rate_interval", "1m").replace("$instance", ".+")
    answer = http.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", (expression, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def wait_for(http: httpx.Client, expression: str) -> None:
    """Wait until an expression has a value."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError, ValueError):
            if ask(http, expression):
                return
        time.sleep(0.2)
    sys.exit(f"Prometheus never answered {expression}")


def main() -> int:
    """Check everything; 1 where a panel stays empty or a rule is not evaluated."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    promtool("check", "config", str(DEPLOY / "prometheus.yml"))
    promtool("check", "rules", str(DEPLOY / "prometheus-alerts.yml"))
    with LocalServer(FLAGS) as server, prometheus(server.url.removeprefix("http://")) as http:
        wait_for(http, 'up{job="session-server"} == 1')
        for _ in range(3):
            asyncio.run(work(server.url))
            ended = httpx.get(f"{server.url}/metrics", trust_env=False).text
            time.sleep(2.0)
        promtool("check", "metrics", given=ended)
        empty = [
            panel["title"]
            for panel in dashboard.dashboard()["panels"]
            for target in panel.get("targets", ())
            if not ask(http, target["expr"])
        ]
        rules = http.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        unwell = [rule["name"] for rule in rules if rule["health"] != "ok"]
        firing = [rule["name"] for rule in rules if rule["state"] != "inactive"]
    num_series = sum(1 for line in ended.splitlines() if line and line[0] != "#")
    print(f"{len(dashboard.expressions())} expressions answered, {num_series} series scraped")
    print(f"empty: {', '.join(empty) or 'none'}")
    print(f"{len(rules)} rules, not evaluated: {unwell or 'none'}, active: {firing or 'none'}")
    return 1 if unwell or set(empty) - QUIET else 0


if __name__ == "__main__":
    sys.exit(main())
