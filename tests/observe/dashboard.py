"""The Grafana dashboard of examples/deploy, from a short list: `python -m tests.docs.tables` writes
it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

WIDTH = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
OURS = "session_server"
QUANTILES = ("0.5", "0.95", "0.99")


@dataclass(frozen=True)
class Panel:
    """One panel: `queries` maps the legend of each query to its expression, in which `%` stands for
    the filter of the chosen servers."""

    title: str
    unit: str
    queries: Mapping[str, str]
    about: str = ""
    is_stacked: bool = False
    is_stat: bool = False
    bad_from: float | None = None
    mappings: Mapping[str, str] = field(default_factory=dict)


def rate(metric: str, by: str = "", extra: str = "") -> str:
    """The growth of a counter per second."""
    selector = f"{OURS}_{metric}{{%{extra}}}"
    return f"sum{f' by ({by})' if by else ''} (rate({selector}[$__rate_interval]))"


def total(metric: str, by: str = "", extra: str = "") -> str:
    """A gauge, over all chosen servers."""
    return f"sum{f' by ({by})' if by else ''} ({OURS}_{metric}{{%{extra}}})"


def quantiles(metric: str) -> dict[str, str]:
    """The median and two tails of a histogram."""
    inner = f"sum by (le) (rate({OURS}_{metric}_bucket{{%}}[$__rate_interval]))"
    return {f"p{float(q) * 100:g}": f"histogram_quantile({q}, {inner})" for q in QUANTILES}


def is_up(metric: str, legend: str) -> dict[str, str]:
    """The worst of all chosen servers."""
    return {legend: f"min({OURS}_{metric}{{%}})"}


ROWS: Mapping[str, Sequence[Panel]] = {
    "Traffic": (
        Panel(
            "Engine",
            "none",
            is_up("engine_up", "up"),
            "0 while there is no engine that takes turns.",
            is_stat=True,
            mappings={"0": "down", "1": "up"},
        ),
        Panel(
            "Memory violations",
            "none",
            {"violations": total("memory_check_violations")},
            "Anything but 0 is a fault: see the runbook.",
            is_stat=True,
            bad_from=1,
        ),
        Panel("Open sessions", "none", {"sessions": total("sessions")}, is_stat=True),
        Panel("Unfinished turns", "none", {"turns": total("unfinished_turns")}, is_stat=True),
        Panel("Turns ended", "reqps", {"{{outcome}}": rate("turns_total", "outcome")}),
        Panel(
            "Tokens",
            "short",
            {
                "generated": rate("generation_tokens_total"),
                "computed of prompts": (
                    rate("prompt_tokens_total") + " - " + rate("prompt_tokens_cached_total")
                ),
                "cached of prompts": rate("prompt_tokens_cached_total"),
            },
            "Per second.",
        ),
        Panel(
            "Turns",
            "none",
            {
                "{{state}}": total("unfinished_turns", "state"),
                "{{state}} in the engine": total("engine_turns", "state"),
            },
        ),
        Panel("HTTP requests", "reqps", {"{{status}}": rate("http_requests_total", "status")}),
        Panel("Refusals", "reqps", {"{{code}}": rate("refusals_total", "code")}),
        Panel(
            "Of each budget",
            "percentunit",
            {"{{budget}}": f"max by (budget) ({OURS}_budget_used{{%}} / {OURS}_budget_limit{{%}})"},
            "Of the fullest server. It refuses where this reaches 1, and one owner earlier.",
            bad_from=0.9,
        ),
    ),
    "Roles": (
        Panel(
            "Prompts that replicas compute for others",
            "reqps",
            {"{{side}} {{outcome}}": rate("prefills_total", "side, outcome")},
            "Sent by decode replicas, served by prefill replicas. What is not done is computed by"
            " whoever has sent it.",
        ),
        Panel("Under way", "none", {"{{side}}": total("prefills_under_way", "side")}),
        Panel("Tokens of them", "short", {"{{side}}": rate("prefill_tokens_total", "side")}),
        Panel("Bytes of them", "Bps", {"{{side}}": rate("prefill_bytes_total", "side")}),
        Panel(
            "Seconds until one is there",
            "s",
            {
                "{{side}}": rate("prefill_seconds_total", "side")
                + " / "
                + rate("prefills_total", "side", ', outcome="done"')
            },
        ),
        Panel("Replicas by role", "none", {"{{role}}": total("role", "role")}),
    ),
    "Latency": (
        Panel("Time to first token", "s", quantiles("time_to_first_token_seconds")),
        Panel("Between tokens", "s", quantiles("inter_token_seconds")),
        Panel("Whole turns", "s", quantiles("turn_seconds")),
        Panel(
            "In the queue",
            "s",
            quantiles("queue_seconds"),
            "Rises first when the machine is too small.",
        ),
    ),
    "Memory": (
        Panel(
            "Pages by account",
            "short",
            {"{{pool}} {{account}}": total("pages", "pool, account")},
            "The accounts of a pool add up to its pages.",
            is_stacked=True,
        ),
        Panel(
            "Held of each pool",
            "percentunit",
            {"{{pool}}": f"max by (pool) ({OURS}_kv_usage_ratio{{%}})"},
            "Sessions at rest are held too, and lose their KV when turns need it.",
        ),
        Panel(
            "Bytes by pool",
            "bytes",
            {
                "{{pool}}": f"sum by (pool) (sum by (pool, instance) ({OURS}_pages{{%}})"
                f" * on (pool, instance) {OURS}_page_bytes{{%}})"
            },
        ),
        Panel("Retractions", "cps", {"turns": rate("retractions_total")}),
    ),
    "Sessions": (
        Panel(
            "Sessions",
            "none",
            {"open": total("sessions"), "with KV": total("resident_sessions")},
        ),
        Panel(
            "Opened and closed",
            "cps",
            {
                "opened": rate("sessions_opened_total"),
                "closed: {{reason}}": rate("sessions_closed_total", "reason"),
            },
        ),
        Panel(
            "KV lost",
            "cps",
            {"{{reason}}": rate("session_evictions_total", "reason")},
            "By pressure: the pool is too small for the sessions that are used.",
        ),
        Panel("Readers that came back", "cps", {"{{outcome}}": rate("resumes_total", "outcome")}),
    ),
    "Cache": (
        Panel(
            "Cached of prompts",
            "percentunit",
            {"share": rate("prompt_tokens_cached_total") + " / " + rate("prompt_tokens_total")},
            "What sessions save.",
        ),
        Panel(
            "Drafts of the input",
            "short",
            {
                "computed": rate("input_draft_tokens_total"),
                "used": rate("input_draft_tokens_used_total"),
            },
            "Tokens per second; what was computed and not used was wasted.",
        ),
        Panel("Computed again in doubt", "short", {"tokens": rate("reprefill_tokens_total")}),
        Panel("KV outside of the pools", "bytes", {"{{tier}}": total("kv_tier_bytes", "tier")}),
        Panel(
            "KV copied",
            "Bps",
            {
                "out": rate("kv_spilled_bytes_total"),
                "back": rate("kv_restored_bytes_total"),
                "to files": rate("kv_written_bytes_total"),
            },
        ),
        Panel(
            "Tokens whose KV was copied",
            "short",
            {
                "out": rate("kv_spilled_tokens_total"),
                "back": rate("kv_restored_tokens_total"),
            },
            "Tokens per second; what came back was not computed.",
        ),
        Panel(
            "Bandwidth of copies",
            "Bps",
            {
                "out": rate("kv_spilled_bytes_total") + " / " + rate("kv_spill_seconds_total"),
                "back": rate("kv_restored_bytes_total") + " / " + rate("kv_restore_seconds_total"),
            },
            "Of the copies themselves, from memory and from files.",
        ),
        Panel(
            "KV found outside",
            "percentunit",
            {"share": rate("kv_hits_total") + " / " + rate("kv_lookups_total")},
            "Of the turns of sessions without KV in the pools: what is not found is computed.",
        ),
        Panel(
            "KV not copied",
            "cps",
            {
                "failed": rate("kv_failed_copies_total"),
                "files refused": rate("kv_refused_files_total"),
                "no room": rate("kv_no_room_files_total"),
                "dropped": rate("kv_dropped_segments_total"),
            },
            "What gave way to others is dropped. Files are refused that somebody has changed.",
        ),
    ),
    "Engine": (
        Panel("Forwards", "ops", {"forwards": rate("forwards_total")}),
        Panel(
            "Where time goes",
            "percentunit",
            {"forwards": rate("forward_seconds_total"), "host": rate("host_seconds_total")},
            "Of each second. With overlap both may run at once.",
        ),
        Panel(
            "CUDA graphs",
            "ops",
            {"{{outcome}}": rate("cuda_graph_forwards_total", "outcome")},
            "Forwards that were replayed, and others by reason; nothing without a GPU.",
        ),
        Panel("Turns in a forward", "none", quantiles("forward_turns")),
        Panel("Prompt tokens in a forward", "none", quantiles("forward_prefill_tokens")),
        Panel(
            "Speculation",
            "percentunit",
            {
                "accepted": rate("spec_decode_num_accepted_tokens_total")
                + " / "
                + rate("spec_decode_num_draft_tokens_total")
            },
            "Share of the drafted tokens that were accepted.",
        ),
        Panel("Grammar checks", "cps", {"{{outcome}}": rate("grammar_checks_total", "outcome")}),
    ),
    "Sockets": (
        Panel("Readers", "none", {"{{kind}}": total("connections", "kind")}),
        Panel("Readers opened", "cps", {"{{kind}}": rate("connections_opened_total", "kind")}),
        Panel("WebSockets closed", "cps", {"{{code}}": rate("socket_closes_total", "code")}),
        Panel(
            "Event loop lag",
            "s",
            quantiles("event_loop_lag_seconds"),
            "Sockets suffer above 0.1 s.",
            bad_from=0.1,
        ),
        Panel("Tasks", "none", {"tasks": total("event_loop_tasks")}),
        Panel(
            "Server process",
            "bytes",
            {"resident": "sum(process_resident_memory_bytes{%})"},
            "Without the engine's.",
        ),
        Panel("Descriptors", "none", {"open": "sum(process_open_fds{%})"}),
    ),
    "Faults": (
        Panel(
            "Engine",
            "none",
            {
                what: f"sum (increase({OURS}_engine_{what}_total{{%}}[$__rate_interval]))"
                for what in ("deaths", "restarts", "stalls")
            },
            bad_from=1,
        ),
        Panel("Turns failed", "cps", {"{{code}}": rate("turn_failures_total", "code")}),
        Panel("Stalled for", "s", {"seconds": f"max ({OURS}_engine_stalled_seconds{{%}})"}),
        Panel(
            "Memory checks",
            "cps",
            {
                "checks": rate("memory_checks_total"),
                "probes": rate("memory_probes_total"),
                "rebuilds": rate("memory_rebuilds_total"),
            },
        ),
        Panel(
            "Cost of checks",
            "percentunit",
            {"share": f"max ({OURS}_memory_check_cost_ratio{{%}})"},
        ),
        Panel(
            "Commits of the store",
            "s",
            quantiles("store_commit_seconds"),
            "How long turns wait for the disk.",
        ),
        Panel("Writes to the store", "cps", {"{{outcome}}": rate("store_writes_total", "outcome")}),
        Panel(
            "Not on disk",
            "none",
            {
                "sessions": total("store_sessions_behind"),
                "failing": f"max ({OURS}_store_failing{{%}})",
            },
            "Sessions of which something could not be written; failing is 1 while nothing can be.",
            bad_from=1,
        ),
        Panel(
            "Sessions moved between memory and store",
            "cps",
            {"{{kind}}": rate("store_session_moves_total", "kind")},
        ),
        Panel(
            "Sessions on disk alone",
            "none",
            {"sessions": total("store_sessions_unread")},
            "They are read when somebody names them.",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "session-server",
        "title": "session-server",
        "description": "Sessions, turns, memory and sockets of session-server.",
        "tags": ["session-server", "llm"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": list(_panels()),
    }


def text() -> str:
    """The file: a line for each panel."""
    members = []
    for name, value in dashboard().items():
        if name == "panels":
            lines = ",\n".join(f"  {json.dumps(panel)}" for panel in value)
            members.append(f' "panels": [\n{lines}\n ]')
        else:
            members.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(members) + "\n}\n"


def expressions() -> list[str]:
    """Every expression, with the names of variables in it."""
    return [
        target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())
    ]


def _variables() -> list[dict[str, Any]]:
    query = f"label_values({OURS}_build_info, instance)"
    return [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"},
        {
            "type": "query",
            "name": "instance",
            "label": "Server",
            "datasource": DATASOURCE,
            "query": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _panels() -> Iterator[dict[str, Any]]:
    ids, y = count(1), 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": WIDTH, "x": 0, "y": y}
        yield {
            "type": "row",
            "id": next(ids),
            "title": title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        y += 1
        for is_stat, height in ((True, 3), (False, 7)):
            chosen = [panel for panel in panels if panel.is_stat is is_stat]
            width = WIDTH // (4 if len(chosen) % 3 or is_stat else 3)
            for index, panel in enumerate(chosen):
                line, column = divmod(index, WIDTH // width)
                place = {"h": height, "w": width, "x": column * width, "y": y + line * height}
                yield _panel(panel, next(ids), place)
            y += -(-len(chosen) * width // WIDTH) * height


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 40 if panel.is_stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
    }
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    options: dict[str, Any] = {
        "legend": legend,
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.is_stat:
        custom = {}
        options = {
            "graphMode": "area",
            "colorMode": "value",
            "justifyMode": "auto",
            "textMode": "auto",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
            "orientation": "auto",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        }
    steps = [{"color": "green", "value": None}]
    if panel.bad_from is not None:
        steps.append({"color": "red", "value": panel.bad_from})
    values = {key: {"text": shown} for key, shown in panel.mappings.items()}
    return {
        "type": "stat" if panel.is_stat else "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": dict(place),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expr.replace("%", 'instance=~"$instance"'),
                "legendFormat": legend_format,
            }
            for index, (legend_format, expr) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
                "mappings": [{"type": "value", "options": values}] if values else [],
            },
            "overrides": [],
        },
        "options": options,
    }
