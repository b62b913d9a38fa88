"""Show what a running server holds, and check that its page accounts balance.

The exit status is 1 if they do not balance, or if the server does not answer.

examples:
  session-server audit
  session-server audit --full                          recount every page first
  session-server audit --full --trace --json > books.json     for a bug report
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from session_server.arguments import add_server, whole_number
from session_server.client import key_header, server_address
from session_server.core.events import ACCOUNTS
from session_server.terminal import SERVER_FAILURES, make_table, print_failure, printable

MAX_ASKED: Final = 200
"""Sessions that the server is asked about, as many as it tells at once."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `audit`."""
    add_server(parser, about="URL of the server", default="http://127.0.0.1:30000")
    check = parser.add_argument_group("check", "Choose what is counted.")
    check.add_argument("--full", action="store_true", help="recount every page first")
    output = parser.add_argument_group("output", "Choose what is shown.")
    output.add_argument(
        "--limit",
        type=whole_number(0),
        metavar="N",
        default=20,
        help="list at most N sessions (default: 20)",
    )
    output.add_argument(
        "--trace",
        action="store_true",
        help="with --json: include the steps before the first violation",
    )
    output.add_argument("--json", action="store_true", help="print the server's answers as JSON")


def run(args: argparse.Namespace) -> int:
    """Show the server's memory and sessions. Return 0 if the accounts balance, else 1."""
    console = Console()
    try:
        memory, sessions = _fetch(args)
    except SERVER_FAILURES as error:
        return print_failure(error, console, key=args.api_key)
    problems = imbalances(memory)
    if args.json:
        console.print_json(json.dumps({"memory": memory, "sessions": sessions}))
        return 1 if problems else 0
    console.print(pool_table(memory["pools"]))
    console.print(session_table(memory["sessions"], sessions, args.limit))
    console.print(f"rows {memory['rows'] - memory['rows_free']} of {memory['rows']} held")
    if told := tiers_line(memory["tiers"]):
        console.print(told)
    console.print(checks_line(memory["checks"]))
    for problem in problems:
        console.print(f"[red]{escape(printable(problem))}[/]")
    return 1 if problems else 0


def imbalances(memory: Mapping[str, Any]) -> list[str]:
    """Return the problems in an answer of `/v1/admin/memory`, in words."""
    problems = []
    for name, pool in memory["pools"].items():
        total = sum(pool[account] for account in ACCOUNTS)
        if total != pool["pages"]:
            problems.append(
                f"pool {name}: the accounts add up to {total}, the pool has {pool['pages']} pages"
            )
        if pool["quarantine"]:
            problems.append(f"pool {name}: {pool['quarantine']} pages are quarantined")
    checks = memory["checks"]
    if checks["violations"]:
        problems.append(f"the memory checker counted {checks['violations']} violations")
        problems += [f"  {text}" for text in checks["recent"]]
    if checks["quarantined_sessions"]:
        problems.append(f"quarantined sessions: {', '.join(checks['quarantined_sessions'])}")
    if checks["rebuilds"]:
        problems.append(f"the accounts were rebuilt {checks['rebuilds']} times")
    return problems


def checks_line(checks: Mapping[str, Any]) -> str:
    """Describe how often each check level ran, and its share of the engine's time."""
    of_accounts, of_sessions, recounts, probes = checks["levels"].values()
    ago_s = checks["last_probe_ago_s"]
    probed = "" if ago_s is None else f", the last probe {ago_s:.0f} s ago"
    return (
        f"checks: {of_accounts} of accounts, {of_sessions} of sessions, {recounts} recounts, "
        f"{probes} page probes\n{checks['violations']} violations, "
        f"{checks['cost_share']:.2%} of the time the engine worked{probed}"
    )


def tiers_line(tiers: Mapping[str, Any]) -> str:
    """Describe the KV outside of the pools; "" where there is none and was none."""
    if not tiers["spilled_tokens"] and not tiers["disk_bytes"]:
        return ""
    mib = 1 << 20
    return (
        f"KV outside of the pools: {tiers['host_bytes'] / mib:.0f} MiB in host memory, "
        f"{tiers['disk_bytes'] / mib:.0f} MiB on disk\n"
        f"{tiers['spilled_tokens']} tokens copied out, {tiers['restored_tokens']} back, for "
        f"{tiers['hits']} of {tiers['lookups']} searches for cold sessions; "
        f"{tiers['refused_files']} files refused, {tiers['failed_copies']} copies failed"
    )


def pool_table(pools: Mapping[str, Mapping[str, int]]) -> Table:
    """Tabulate pages by holder, one column per pool."""
    rows = ((account, *(pool[account] for pool in pools.values())) for account in ACCOUNTS)
    table = make_table((Column("pages by holder"), *pools), rows)
    table.add_section()
    table.add_row("all", *(str(pool["pages"]) for pool in pools.values()))
    table.add_row("tokens per page", *(str(pool["page_size"]) for pool in pools.values()))
    return table


def session_table(
    holdings: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, Any]], limit: int
) -> Table:
    """Tabulate sessions: what the engine holds next to what the server knows.

    A session is called what its client calls it, where that is among those that were asked for.
    Published pages are in the tree, where others may share them; private ones are the session's.
    """
    known = {session["id"]: session for session in sessions}
    rows = (
        (
            escape(known.get(held["session_id"], {}).get("session_id", held["session_id"])),
            held["state"].lower(),
            held["tokens"],
            held["committed_len"],
            f"{sum(held['protected_pages'].values())} + {sum(held['private_pages'].values())}",
            known.get(held["session_id"], {}).get("turns", ""),
        )
        for held in holdings[:limit]
    )
    hidden = len(holdings) - limit
    title = f"sessions: {len(holdings)}" + (f", {hidden} not shown" if hidden > 0 else "")
    first = (Column("session", no_wrap=True), Column("state"))
    return make_table(
        (*first, "tokens", "with KV", "published + private", "turns"), rows, title=title
    )


def _fetch(args: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    headers = key_header(args.api_key)
    base, verify = server_address(args.url), args.trust or True
    with httpx.Client(
        base_url=base, headers=headers, timeout=30.0, trust_env=False, verify=verify
    ) as client:
        params = {"full": int(args.full), "trace": int(args.trace)}
        memory = client.get("/v1/admin/memory", params=params)
        memory.raise_for_status()
        limit = min(max(args.limit, 1), MAX_ASKED)
        sessions = client.get("/v1/admin/sessions", params={"limit": limit, "sort": "opened"})
        sessions.raise_for_status()
    return memory.json(), sessions.json()["data"]
