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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any, Final

import httpx
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from session_server.arguments import KEY_ADVICE, add_server, whole_number
from session_server.client import (
    ClientError,
    ClientOptions,
    TurnText,
    connect,
    key_header,
    server_address,
)
from session_server.demo.corpus import dialogue, is_right
from session_server.local_server import LocalServer, ServerFailed
from session_server.progress import StepProgress

MIN_RIGHT_SHARE: Final = 0.99
MAX_ANSWER_TOKENS: Final = 48
_COUNT: Final = whole_number(1, 4096)
_HELD: Final = ("session_held", "active", "tree_protected", "fenced", "spill", "quarantine")


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


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """Record the memory ledger: pages of all pools by account, and the counts of the checker."""

    pages: int
    free: int
    reserved: int
    tree_evictable: int
    held: int
    check_runs: int
    check_violations: int


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Report everything that the demo found. `ledger_closed` is read after all sessions closed,
    `ledger_flushed` after the radix tree was emptied too."""

    num_sessions: int
    num_turns: int
    num_right: int
    errors: tuple[str, ...]
    seconds: float
    turns: tuple[TurnRecord, ...]
    ledger_start: LedgerRecord
    ledger_open: LedgerRecord
    ledger_closed: LedgerRecord
    ledger_flushed: LedgerRecord

    @property
    def right_share(self) -> float:
        """Return the share of right answers over every turn of every session."""
        return self.num_right / self.num_turns if self.num_turns else 0.0

    @property
    def are_pages_back(self) -> bool:
        """Return whether closing gave every page back: to the tree's evictable part, then to the
        pool."""
        closed, flushed = self.ledger_closed, self.ledger_flushed
        return closed.held == 0 and flushed.free + flushed.reserved == flushed.pages

    @property
    def is_good(self) -> bool:
        """Return whether every check passed."""
        return (
            not self.errors
            and self.right_share >= MIN_RIGHT_SHARE
            and self.ledger_flushed.check_runs > 0
            and self.ledger_flushed.check_violations == 0
            and self.are_pages_back
        )

    def as_json(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        verdict = {
            "right_share": self.right_share,
            "pages_back": self.are_pages_back,
            "ok": self.is_good,
        }
        return asdict(self) | verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server demo`."""
    load = parser.add_argument_group("load", "How much is said.")
    load.add_argument(
        "--sessions", type=_COUNT, metavar="N", default=8, help="conversations (default: 8)"
    )
    load.add_argument(
        "--turns", type=_COUNT, metavar="N", default=12, help="turns of each (default: 12)"
    )
    load.add_argument(
        "--seed", type=int, metavar="N", default=2026, help="of the dialogues (default: 2026)"
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
    except httpx.HTTPStatusError as error:
        console.print(f"[red]the demo could not run:[/red] {escape(error.response.text[:400])}")
        if error.response.status_code == HTTPStatus.UNAUTHORIZED:
            console.print(KEY_ADVICE)
        return 1
    except (ServerFailed, ClientError, httpx.HTTPError) as error:
        console.print(f"[red]the demo could not run:[/red] {escape(str(error))}")
        if isinstance(error, httpx.ConnectError):
            console.print("is a server running there? without --url the demo starts its own")
        return 1
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _show(report, console)
    return 0 if report.is_good else 1


@dataclass(frozen=True, slots=True)
class _DemoRun:
    """Hold what all conversations share. `last_turns` keeps them parked while the ledger is
    read."""

    url: str
    options: ClientOptions
    seed: int
    num_turns: int
    add: Callable[[TurnRecord], None]
    last_turns: asyncio.Barrier


async def _run_sessions(url: str, args: argparse.Namespace, console: Console) -> DemoReport:
    begin = time.perf_counter()
    turns: list[TurnRecord] = []
    errors: list[str] = []
    headers = key_header(args.api_key)
    base = server_address(url)
    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=30.0, trust_env=False
    ) as http:
        ledger_start = await _ledger(http)
        with StepProgress(console) as progress:
            task = progress.add_task("turns", total=args.sessions * args.turns)

            def add(record: TurnRecord) -> None:
                turns.append(record)
                progress.advance(task)

            last_turns = asyncio.Barrier(args.sessions + 1)
            options = ClientOptions(token=args.api_key)
            demo = _DemoRun(base, options, args.seed, args.turns, add, last_turns)
            talks = [
                asyncio.create_task(_converse(demo, number)) for number in range(args.sessions)
            ]
            ledger_open = await _ledger_while_open(http, last_turns, talks)
            for outcome in await asyncio.gather(*talks, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    errors.append(f"{type(outcome).__name__}: {outcome}")
        ledger_closed = await _ledger(http)
        (await http.post("/flush_cache")).raise_for_status()
        ledger_flushed = await _ledger(http)
    return DemoReport(
        num_sessions=args.sessions,
        num_turns=args.sessions * args.turns,
        num_right=sum(record.is_right for record in turns),
        errors=tuple(errors),
        seconds=time.perf_counter() - begin,
        turns=tuple(sorted(turns, key=lambda record: (record.session, record.turn))),
        ledger_start=ledger_start,
        ledger_open=ledger_open,
        ledger_closed=ledger_closed,
        ledger_flushed=ledger_flushed,
    )


async def _converse(demo: _DemoRun, number: int) -> None:
    """Run one conversation, from open to close."""
    try:
        async with await connect(demo.url, options=demo.options) as session:
            for turn, exchange in enumerate(dialogue(demo.seed + number, demo.num_turns).turns):
                begin = asyncio.get_running_loop().time()
                first_s = None
                handle = await session.start(
                    exchange.user, sampling={"temperature": 0, "max_tokens": MAX_ANSWER_TOKENS}
                )
                async for event in handle:
                    if isinstance(event, TurnText) and first_s is None:
                        first_s = event.received_s
                result = await handle.result()
                end = asyncio.get_running_loop().time()
                usage = result.usage
                demo.add(
                    TurnRecord(
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
                )
            await demo.last_turns.wait()  # all sessions are parked now: the ledger is read
            await demo.last_turns.wait()
    except BaseException:
        await demo.last_turns.abort()
        raise


async def _ledger_while_open(
    http: httpx.AsyncClient, last_turns: asyncio.Barrier, talks: list[asyncio.Task[None]]
) -> LedgerRecord:
    """Read the ledger when every session has had its last turn and none has closed."""
    try:
        await last_turns.wait()
        ledger = await _ledger(http)
        await last_turns.wait()
    except asyncio.BrokenBarrierError:
        await asyncio.wait(talks)
        return await _ledger(http)
    return ledger


async def _ledger(http: httpx.AsyncClient) -> LedgerRecord:
    answer = await http.get("/v1/admin/memory", params={"full": 1})
    answer.raise_for_status()
    report = answer.json()
    pools = list(report["pools"].values())

    def total(*accounts: str) -> int:
        return sum(int(pool[account]) for pool in pools for account in accounts)

    return LedgerRecord(
        pages=total("pages"),
        free=total("free"),
        reserved=total("reserved"),
        tree_evictable=total("tree_evictable"),
        held=total(*_HELD),
        check_runs=report["checks"]["runs"],
        check_violations=report["checks"]["violations"],
    )


def _show(report: DemoReport, console: Console) -> None:
    table = Table(
        title="per turn, median over the sessions",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("turn", "context", "cached", "new", "out", "TTFT ms", "right"):
        table.add_column(column, justify="right")
    for turn in sorted({record.turn for record in report.turns}):
        rows = [record for record in report.turns if record.turn == turn]

        def median(field: str, rows: list[TurnRecord] = rows) -> float:
            return statistics.median(float(getattr(record, field)) for record in rows)

        table.add_row(
            str(turn + 1),
            f"{median('input_tokens'):.0f}",
            f"{median('cached_tokens'):.0f}",
            f"{median('new_tokens'):.0f}",
            f"{median('output_tokens'):.0f}",
            f"{median('ttft_ms'):.1f}",
            f"{sum(record.is_right for record in rows)}/{len(rows)}",
        )
    _show_conversation(report, console)
    console.print(table)
    for record in report.turns:
        if not record.is_right:
            console.print(f"[yellow]wrong:[/yellow] {record.question!r} -> {record.answer!r}")
    for error in report.errors:
        console.print(f"[red]error:[/red] {error}")
    ledgers = Table(
        title="memory ledger, pages of all pools",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("moment", "pages", "free", "reserved", "evictable", "held", "checks", "bad"):
        ledgers.add_column(column, justify="right")
    for moment, ledger in (
        ("start", report.ledger_start),
        ("all open", report.ledger_open),
        ("all closed", report.ledger_closed),
        ("tree emptied", report.ledger_flushed),
    ):
        ledgers.add_row(moment, *(str(value) for value in asdict(ledger).values()))
    console.print(ledgers)
    console.print(
        f"{report.num_sessions} sessions x {report.num_turns // report.num_sessions} turns in "
        f"{report.seconds:.1f} s: {report.num_right} of {report.num_turns} answers right "
        f"({report.right_share:.1%}), {report.ledger_flushed.check_violations} violations in "
        f"{report.ledger_flushed.check_runs} checks, "
        f"pages {'all back' if report.are_pages_back else '[red]MISSING[/red]'}"
    )
    console.print("[green]everything held[/green]" if report.is_good else "[red]NOT good[/red]")


def _show_conversation(report: DemoReport, console: Console) -> None:
    """Print the first session, word by word, and what each turn cost."""
    console.print("[bold]the first of the conversations[/bold]")
    for record in report.turns:
        if record.session == 0:
            console.print(f"  [cyan]user[/cyan]       {record.question}", highlight=False)
            console.print(
                f"  [green]assistant[/green]  {record.answer}  [dim]in {record.input_tokens} "
                f"({record.cached_tokens} cached, {record.new_tokens} new) · out "
                f"{record.output_tokens} · ttft {record.ttft_ms:.0f} ms[/dim]",
                highlight=False,
            )
