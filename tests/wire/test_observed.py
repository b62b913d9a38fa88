"""What the dashboard and the alerts ask for is what a server that has worked shows."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from session_server.local_server import LocalServer
from tests.observe import dashboard
from tests.observe.collector import Collector, of_turn
from tests.observe.promql import BY_PROMETHEUS, alerts, labels_of, metrics_of
from tests.observe.work import work
from tests.wire.conftest import SMALL

UNUSED: Final = {"code", "side", "outcome"}
"""Labels of what a test should not leave behind (turns that failed, engines that died), and of what
only replicas with roles show."""

CANARY = "canary4711"


def test_every_expression_names_metrics_and_labels_that_are_shown(tmp_path: Path) -> None:
    with LocalServer([*SMALL, "--store", str(tmp_path)]) as server:
        asyncio.run(work(server.url))
        scrape = httpx.get(f"{server.url}/metrics").text
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(scrape):
        suffix = "_total" if family.type == "counter" else ""
        labels = {label for sample in family.samples for label in sample.labels}
        shown[family.name + suffix] = labels
    rules = [rule["expr"] for rule in alerts()]
    for expression in (*dashboard.expressions(), *rules):
        names = metrics_of(expression)
        assert names <= shown.keys(), expression
        known = set[str]().union(*(shown[name] for name in names))
        assert labels_of(expression) <= known | BY_PROMETHEUS | UNUSED, expression
    read = {name for expression in dashboard.expressions() for name in metrics_of(expression)}
    ours = {name for name in shown if name.startswith("session_server_")}
    assert ours - read == {
        "session_server_build_info",
        "session_server_engine_info",
        "session_server_page_tokens",
    }


def test_what_is_said_is_in_no_log_metric_or_trace() -> None:
    """At every severity, over every surface, whether a turn completes, fails or is refused."""
    lines: list[str] = []
    with Collector() as collector:
        flags = [*SMALL, "--log-level", "debug", "--log-format", "json"]
        flags += ["--otlp-traces-endpoint", collector.url]
        with LocalServer(flags, on_line=lines.append) as server:
            asyncio.run(work(server.url, said=CANARY))
            scraped = httpx.get(f"{server.url}/metrics", trust_env=False).text
        spans = collector.wait_for("deliver", "decode", "check grammar")
    logged = "\n".join(lines)
    assert all(word in logged for word in ("turn finished", "session opened", "request", "socket"))
    assert CANARY not in logged
    assert CANARY not in scraped
    assert not any(CANARY.encode() in body for body in collector.bodies)
    root, *stages = of_turn(spans, "t1")
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] > 0
    wanted = ["receive", "submit", "queue", "prefill", "decode", "settle", "deliver"]
    assert [stage.name for stage in stages] == wanted
    assert all(one.end_ns <= other.begin_ns + 1000 for one, other in pairwise(stages))
    assert (stages[0].begin_ns, stages[-2].end_ns) == (root.begin_ns, root.end_ns)
