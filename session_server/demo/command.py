"""Hold many conversations at once with a real server and check every answer.

It starts `session-server serve` as a separate process, opens sessions over
WebSockets, lets each hold a dialogue whose later turns ask for what earlier
turns told, and reads the memory ledger before, during and after. The exit
status says whether everything held.

examples:
  session-server demo                                8 conversations of 12 turns
  session-server demo --sessions 64 --turns 40
  session-server demo --url http://127.0.0.1:30000 --json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import httpx
from rich.console import Console
from rich.markup import escape

from session_server.arguments import add_server, whole_number
from session_server.client import (
    ClientOptions,
    SessionClient,
    TurnText,
    connect,
    key_header,
    server_address,
)
from session_server.core.events import ACCOUNTS
from session_server.demo.corpus import Exchange, dialogue, is_right
from session_server.local_server import LocalServer
from session_server.progress import StepProgress
from session_server.terminal import SERVER_FAILURES, make_table, print_failure

MIN_RIGHT_SHARE: Final = 0.99
MAX_ANSWER_TOKENS: Final = 48
_COUNT: Final = whole_number(1, 4096)
_NOT_HELD: Final = ("free", "reserved", "tree_evictable")
_MOMENTS: Final = {
    "ledger_start": "start",
    "ledger_open": "all open",
    "ledger_closed": "all closed",
    "ledger_flushed": "tree emptied",
}
"""When the memory ledger is read: keys of the report, and what the table says."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """Record one turn as its client saw it; `new_tokens` were computed, `cached_tokens` reused."""

    session: int
    turn: int
    question: str
    answer: str
    is_right: bool
    input_tokens: int
    cached_tokens: int
    new_tokens: int
    output_tokens: int
    ttft_ms: float
    turn_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server demo`."""
    load = parser.add_argument_group("load", "Choose how much is said.")
    load.add_argument(
        "--sessions", type=_COUNT, metavar="N", default=8, help="conversations (default: 8)"
    )
    load.add_argument(
        "--turns", type=_COUNT, metavar="N", default=12, help="turns of each (default: 12)"
    )
    load.add_argument(
        "--seed", type=int, metavar="N", default=2026, help="seed of the dialogues (default: 2026)"
    )
    add_server(parser, about="of a running server; none: start one, and stop it again")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 if every check passed, 1 otherwise."""
    console = Console(stderr=args.json)
    try:
        with contextlib.ExitStack() as stack:
            url = args.url
            if url is None:
                with console.status("starting a server with the embedded model ..."):
                    server = stack.enter_context(LocalServer())
                url = server.url
                console.print(f"server process {server.pid} listens on {url}")
            report = asyncio.run(_run_sessions(url, args, console))
    except SERVER_FAILURES as error:
        advice = "without --url the demo starts its own"
        prefix = "the demo could not run: "
        return print_failure(error, console, key=args.api_key, prefix=prefix, advice=advice)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _show(report, console)
    return 0 if report["ok"] else 1


async def _run_sessions(url: str, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    begin = time.perf_counter()
    turns: list[TurnRecord] = []
    base, headers = server_address(url), key_header(args.api_key)
    last_turns = asyncio.Barrier(args.sessions + 1)
    ledgers: dict[str, dict[str, int]] = {}
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=30.0, trust_env=False, verify=args.trust or True
    ) as http:
        ledgers["ledger_start"] = await _read_ledger(http)
        with StepProgress(console) as progress:
            task = progress.add_task("turns", total=args.sessions * args.turns)

            def add(record: TurnRecord) -> None:
                turns.append(record)
                progress.advance(task)

            talks = [
                asyncio.create_task(_converse(base, number, args, last_turns=last_turns, add=add))
                for number in range(args.sessions)
            ]
            # Between the two waits every session has had its last turn and none has closed.
            with contextlib.suppress(asyncio.BrokenBarrierError):
                await last_turns.wait()
                ledgers["ledger_open"] = await _read_ledger(http)
                await last_turns.wait()
            outcomes = await asyncio.gather(*talks, return_exceptions=True)
        ledgers["ledger_closed"] = await _read_ledger(http)
        ledgers.setdefault("ledger_open", ledgers["ledger_closed"])
        if args.url is None:  # the cache of a running server is not the demo's to empty
            (await http.post("/flush_cache")).raise_for_status()
            ledgers["ledger_flushed"] = await _read_ledger(http)
    turns.sort(key=lambda record: (record.session, record.turn))
    errors = [f"{type(e).__name__}: {e}" for e in outcomes if isinstance(e, BaseException)]
    seconds = time.perf_counter() - begin
    num_turns = args.sessions * args.turns
    judged = _judge(turns, errors, num_turns, ledgers)
    return {
        "num_sessions": args.sessions,
        "num_turns": num_turns,
        "seconds": seconds,
        **judged,
    }


def _judge(
    turns: list[TurnRecord],
    errors: list[str],
    num_turns: int,
    ledgers: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    """Return what was found, and whether every check passed.

    Closing must give every page back: to the tree's evictable part and, on a server of the demo's
    own, whose tree is emptied, to the pool. On a running server others may hold pages before.
    """
    closed = ledgers["ledger_closed"]
    last = ledgers.get("ledger_flushed", closed)
    num_right = sum(record.is_right for record in turns)
    is_checked = last["check_runs"] > 0 and last["check_violations"] == 0
    pages_back = closed["held"] <= ledgers["ledger_start"]["held"]
    if "ledger_flushed" in ledgers:
        pages_back &= last["free"] + last["reserved"] == last["pages"]
    is_right_enough = num_right >= MIN_RIGHT_SHARE * num_turns
    return {
        "num_right": num_right,
        "right_share": num_right / num_turns,
        "errors": errors,
        "turns": [asdict(record) for record in turns],
        **ledgers,
        "pages_back": pages_back,
        "ok": not errors and is_right_enough and is_checked and pages_back,
    }


async def _converse(
    url: str,
    number: int,
    args: argparse.Namespace,
    *,
    last_turns: asyncio.Barrier,
    add: Callable[[TurnRecord], None],
) -> None:
    """Run one conversation, from open to close. `last_turns` keeps it parked in between."""
    try:
        options = ClientOptions(token=args.api_key, trust=args.trust)
        async with await connect(url, options=options) as session:
            for turn, exchange in enumerate(dialogue(args.seed + number, args.turns).turns):
                add(await _take_turn(session, exchange, number, turn))
            await last_turns.wait()
            await last_turns.wait()
    except BaseException:
        await last_turns.abort()
        raise


async def _take_turn(
    session: SessionClient, exchange: Exchange, number: int, turn: int
) -> TurnRecord:
    clock = asyncio.get_running_loop().time
    begin, first_s = clock(), None
    sampling = {"temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
    handle = await session.start(exchange.user, sampling=sampling)
    async for event in handle:
        if isinstance(event, TurnText) and first_s is None:
            first_s = event.received_s
    result = await handle.result()
    end, usage = clock(), result.usage
    return TurnRecord(
        session=number,
        turn=turn,
        question=exchange.user,
        answer=result.text,
        is_right=is_right(result.text, exchange.assistant),
        input_tokens=usage.input_tokens,
        cached_tokens=usage.cached_tokens,
        new_tokens=usage.input_tokens - usage.cached_tokens,
        output_tokens=usage.output_tokens,
        ttft_ms=((first_s or end) - begin) * 1e3,
        turn_ms=(end - begin) * 1e3,
    )


async def _read_ledger(http: httpx.AsyncClient) -> dict[str, int]:
    """Return pages of all pools by account, and the counts of the checker."""
    answer = await http.get("/v1/admin/memory", params={"full": 1})
    answer.raise_for_status()
    report = answer.json()
    pools = report["pools"].values()
    pages = {name: sum(pool[name] for pool in pools) for name in ("pages", *ACCOUNTS)}
    return {
        **{name: pages[name] for name in ("pages", *_NOT_HELD)},
        "held": sum(pages[name] for name in ACCOUNTS if name not in _NOT_HELD),
        "check_runs": report["checks"]["runs"],
        "check_violations": report["checks"]["violations"],
    }


def _show(report: Mapping[str, Any], console: Console) -> None:
    _show_conversation(report["turns"], console)
    by_turn: dict[int, list[dict[str, Any]]] = {}
    for record in report["turns"]:
        by_turn.setdefault(record["turn"], []).append(record)
    columns = ("turn", "context", "cached", "new", "out", "TTFT ms", "right")
    rows = ((turn + 1, *_medians(records)) for turn, records in sorted(by_turn.items()))
    console.print(make_table(columns, rows, title="per turn, median over the sessions"))
    for record in report["turns"]:
        if not record["is_right"]:
            wrong = f"{record['question']!r} -> {record['answer']!r}"
            console.print(f"[yellow]wrong:[/yellow] {escape(wrong)}")
    for error in report["errors"]:
        console.print(f"[red]error:[/red] {escape(error)}")
    accounts = ("moment", "pages", "free", "reserved", "evictable", "held", "checks", "bad")
    ledgers = ((moment, *report[key].values()) for key, moment in _MOMENTS.items() if key in report)
    console.print(make_table(accounts, ledgers, title="memory ledger, pages of all pools"))
    last = report.get("ledger_flushed", report["ledger_closed"])
    num_sessions = report["num_sessions"]
    console.print(
        f"{num_sessions} sessions x {report['num_turns'] // num_sessions} turns in "
        f"{report['seconds']:.1f} s: {report['num_right']} of {report['num_turns']} answers right "
        f"({report['right_share']:.1%})\n{last['check_violations']} violations in "
        f"{last['check_runs']} checks, "
        f"pages {'all back' if report['pages_back'] else '[red]MISSING[/red]'}"
    )
    console.print("[green]everything held[/green]" if report["ok"] else "[red]NOT good[/red]")


def _medians(records: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the cells of one turn of all sessions."""
    names = ("input_tokens", "cached_tokens", "new_tokens", "output_tokens", "ttft_ms")
    medians = {name: statistics.median(record[name] for record in records) for name in names}
    counts = (f"{medians[name]:.0f}" for name in names[:-1])
    num_right = sum(record["is_right"] for record in records)
    return (*counts, f"{medians['ttft_ms']:.1f}", f"{num_right}/{len(records)}")


def _show_conversation(turns: list[dict[str, Any]], console: Console) -> None:
    """Print the first session, word by word, and what each turn cost."""
    console.print("[bold]the first of the conversations[/bold]")
    for record in turns:
        if record["session"] == 0:
            question, answer = (escape(record[name]) for name in ("question", "answer"))
            cost = (
                "in {input_tokens} ({cached_tokens} cached, {new_tokens} new) · out "
                "{output_tokens} · ttft {ttft_ms:.0f} ms"
            ).format_map(record)
            console.print(f"  [cyan]user[/cyan]       {question}", highlight=False)
            console.print(
                f"  [green]assistant[/green]  {answer}\n             [dim]{cost}[/dim]",
                highlight=False,
            )
