"""Put a load of conversations on a running server, and check the answers.

Start a server in one terminal and the load in another:

    session-server serve
    python examples/load_test.py --sessions 64 --turns 20 --abort-rate 0.1 --disconnect-rate 0.05

Every session is one WebSocket of its own that holds a dialogue whose later turns ask for what
earlier turns told, so a session that mixes up, loses or leaks history answers wrongly. Cancelled
turns and cut sockets are injected on purpose and counted apart from errors. At the end the
server's memory ledger must balance, and closing must have given every page back.

Two kinds of load:
  closed   each session speaks again a think time after its last answer: users who wait
  open     turns are due at random times, whether or not the server keeps up: arrivals that do
           not wait; times are counted from when a turn was due, so queueing is not hidden

The exit status is 0 when there were no errors and the ledger is clean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

try:
    import httpx
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    from session_server.arguments import add_server
    from session_server.client import (
        ClientError,
        ClientOptions,
        Refused,
        SessionClient,
        TurnHandle,
        TurnResult,
        TurnText,
        connect,
        server_address,
    )
    from session_server.demo.corpus import Exchange, dialogue, is_right
    from session_server.terminal import SERVER_FAILURES, print_failure
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: run this with .venv/bin/python after `make install`")

HELD_ACCOUNTS = ("session_held", "active", "tree_protected", "fenced", "spill", "quarantine")
LEDGER_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """Record one turn as its user saw it. Times in milliseconds; `at_s`: when it was due."""

    session: int
    turn: int
    at_s: float
    outcome: str
    ttft_ms: float | None
    turn_ms: float
    gaps_ms: tuple[float, ...]
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    is_warm: bool | None
    is_right: bool | None
    is_behind_cancel: bool


@dataclass(slots=True)
class Load:
    """Share the plan and the results of all sessions."""

    args: argparse.Namespace
    progress: Progress
    task: Any
    started_s: float
    turns: list[TurnRecord] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    num_disconnects: int = 0
    num_reconnects: int = 0
    is_interrupted: bool = False

    def add(self, record: TurnRecord) -> None:
        """Record a turn that has ended."""
        self.turns.append(record)
        self.progress.advance(self.task)

    def fail(self, what: str) -> None:
        """Count an error that was not injected."""
        self.errors[what] += 1


class Talk:
    """Run one session from open to close."""

    def __init__(self, load: Load, number: int) -> None:
        self.load = load
        self.number = number
        self.random = Random(load.args.seed * 1_000_003 + number)
        self.previous_total: int | None = None
        self.has_cancelled = False
        self.is_over = False

    async def run(self) -> None:
        """Hold the whole dialogue; whatever goes wrong is counted, not raised."""
        args = self.load.args
        script = dialogue(args.seed * 10_000 + self.number, args.turns).turns
        done = 0
        try:
            options = ClientOptions(token=args.api_key, trust=args.trust)
            async with await connect(args.url, options=options) as session:
                for due_s, exchange in zip(self.due_times(), script, strict=False):
                    done += 1
                    await self.take_turn(session, done, exchange, due_s)
                    if self.is_over:
                        break
                self.load.num_reconnects += session.num_reconnects
        except ClientError as error:
            self.load.fail(type(error).__name__ + f": {error}"[:120])
        self.load.progress.advance(self.load.task, args.turns - done)

    def due_times(self) -> Iterator[float]:
        """Yield when each turn is due (loop time): fixed in an open loop, else after thinking."""
        clock = asyncio.get_running_loop().time
        due_s = clock() + self.random.random() * self.load.args.ramp_s
        while True:
            yield due_s
            pause_s = self.random.expovariate(1.0) * self.load.args.think_s
            due_s = (due_s if self.load.args.loop == "open" else clock()) + pause_s

    async def take_turn(
        self, session: SessionClient, number: int, exchange: Exchange, due_s: float
    ) -> None:
        """Wait until the turn is due, run it, and write down what was seen."""
        args, clock = self.load.args, asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, due_s - clock()))
        sampling = {"temperature": 0, "max_tokens": args.max_tokens}
        turn = await session.start(exchange.user, sampling=sampling)
        arrivals: list[tuple[float, int]] = []
        try:
            async with asyncio.timeout(args.timeout_s):
                result = await self.follow(session, turn, arrivals)
        except TimeoutError:
            self.load.fail(f"no answer within {args.timeout_s:.0f} s")
            self.is_over = True
            return
        except Refused as error:
            self.load.fail(f"refused: {error.code}")
            self.load.progress.advance(self.load.task)
            return
        if result.error is not None:
            self.load.fail(f"failed: {result.error.code}")
        self.load.add(self.record(number, exchange, result, _Times(due_s, clock(), arrivals)))

    async def follow(
        self, session: SessionClient, turn: TurnHandle, arrivals: list[tuple[float, int]]
    ) -> TurnResult:
        """Read the answer; cancel the turn or cut the socket at the configured rates."""
        args = self.load.args
        aborts = self.random.random() < args.abort_rate
        loses = self.random.random() < args.disconnect_rate
        after = self.random.randrange(4)
        if aborts and after == 0:
            await turn.cancel(keep_partial=True)
        async for event in turn:
            if not isinstance(event, TurnText):
                continue
            arrivals.append((event.received_s, max(1, event.num_tokens)))
            if loses:
                loses = False
                self.load.num_disconnects += 1
                session.abort_connection()
            if aborts and len(arrivals) == after:
                await turn.cancel(keep_partial=True)
        return await turn.result()

    def record(
        self, number: int, exchange: Exchange, result: TurnResult, times: _Times
    ) -> TurnRecord:
        """Return the record of a turn.

        A turn is warm if all its history was cached. That is unknown after a cancel,
        because input that was canceled early may not be computed yet.
        """
        usage = result.usage
        completed = result.status == "completed"
        warm = None
        if completed and self.previous_total is not None:
            warm = usage.cached_tokens >= self.previous_total - 1
        self.previous_total = usage.total_tokens if completed else None
        judged = completed and not self.load.args.no_check
        is_behind_cancel = self.has_cancelled
        self.has_cancelled |= result.status == "cancelled"
        first_s = times.arrivals[0][0] if times.arrivals else None
        return TurnRecord(
            session=self.number,
            turn=number,
            at_s=times.due_s - self.load.started_s,
            outcome=result.status,
            ttft_ms=None if first_s is None else 1000 * (first_s - times.due_s),
            turn_ms=1000 * (times.end_s - times.due_s),
            gaps_ms=tuple(times.gaps_ms()),
            input_tokens=usage.input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            is_warm=warm,
            is_right=is_right(result.text, exchange.assistant) if judged else None,
            is_behind_cancel=is_behind_cancel,
        )


@dataclass(frozen=True, slots=True)
class _Times:
    """Hold when a turn was due, when it ended, and when each piece of n tokens came (s)."""

    due_s: float
    end_s: float
    arrivals: Sequence[tuple[float, int]]

    def gaps_ms(self) -> Iterator[float]:
        """Yield the time per token between pieces: a piece of n tokens counts n times."""
        for (before_s, _), (now_s, num_tokens) in zip(
            self.arrivals, self.arrivals[1:], strict=False
        ):
            yield from [1000 * (now_s - before_s) / num_tokens] * num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load and print what it found."""
    args = read_arguments(argv)
    console = Console(stderr=args.json is not None and str(args.json) == "-")
    try:
        report = asyncio.run(run(args, console))
    except KeyboardInterrupt:
        return 130
    except SERVER_FAILURES as error:
        return print_failure(error, console, key=args.api_key)
    show(report, console)
    if args.json is not None:
        text = json.dumps(report, indent=2)
        sys.stdout.write(text + "\n") if str(args.json) == "-" else args.json.write_text(text)
    if args.plot is not None:
        plot(report, args.plot)
        console.print(f"plot written to {args.plot}")
    if report["interrupted"]:
        return 130
    return 0 if report["ok"] else 1


def read_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add_server(parser, about="the server", default="http://127.0.0.1:30000")
    add("--sessions", type=int, default=16, help="conversations at once (default: 16)")
    add("--turns", type=int, default=10, help="turns of each (default: 10)")
    add("--loop", choices=("closed", "open"), default="closed", help="(default: closed)")
    add("--think-s", type=float, default=0.5, help="mean time between turns (default: 0.5)")
    add("--ramp-s", type=float, default=1.0, help="spread of the first turns (default: 1.0)")
    add("--abort-rate", type=float, default=0.0, help="share of turns canceled (default: 0)")
    add("--disconnect-rate", type=float, default=0.0, help="share of sockets cut mid-turn")
    add("--max-tokens", type=int, default=48, help="of one answer (default: 48)")
    add("--timeout-s", type=float, default=120.0, help="longest wait for a turn (default: 120)")
    add("--seed", type=int, default=1, help="of dialogues, pauses and faults (default: 1)")
    add("--no-check", action="store_true", help="do not judge answers (other models)")
    add("--json", type=Path, help="write the report here; - prints it instead of the table")
    add("--plot", type=Path, help="write a picture here (needs matplotlib)")
    args = parser.parse_args(argv)
    for flag, share in (("abort", args.abort_rate), ("disconnect", args.disconnect_rate)):
        if not 0 <= share <= 1:
            parser.error(f"argument --{flag}-rate: expected 0 to 1, got {share}")
    return args


async def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Put the load on the server and gather the report."""
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    async with httpx.AsyncClient(
        base_url=server_address(args.url),
        headers=headers,
        timeout=30.0,
        trust_env=False,
        verify=args.trust or True,
    ) as http:
        before = await ledger(http)
        clock = asyncio.get_running_loop().time
        begin_s = clock()
        with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("turns", total=args.sessions * args.turns)
            load = Load(args, progress, task, begin_s)
            talks = asyncio.gather(*(Talk(load, number).run() for number in range(args.sessions)))
            loop = asyncio.get_running_loop()
            # Ctrl-C ends the load and reports it so far; a second one ends the program.
            loop.add_signal_handler(signal.SIGINT, talks.cancel)
            try:
                await talks
            except asyncio.CancelledError:
                load.is_interrupted = True
            loop.remove_signal_handler(signal.SIGINT)
        elapsed_s = clock() - begin_s
        after = await settled_ledger(http, before)
    return summarize(load, elapsed_s, before, after)


async def ledger(http: httpx.AsyncClient) -> dict[str, int]:
    """Return the server's accounts: pages held, and what its checker found."""
    answer = await http.get("/v1/admin/memory", params={"full": 1})
    answer.raise_for_status()
    memory = answer.json()
    pools = memory["pools"].values()
    return {
        "pages": sum(pool["pages"] for pool in pools),
        "free": sum(pool["free"] for pool in pools),
        "held": sum(pool[account] for pool in pools for account in HELD_ACCOUNTS),
        "check_runs": memory["checks"]["runs"],
        "violations": memory["checks"]["violations"],
    }


async def settled_ledger(http: httpx.AsyncClient, before: dict[str, int]) -> dict[str, int]:
    """Return the accounts once the engine has handled the closes."""
    deadline_s = asyncio.get_running_loop().time() + LEDGER_PATIENCE_S
    while True:
        after = await ledger(http)
        if after["held"] <= before["held"] or asyncio.get_running_loop().time() > deadline_s:
            return after
        await asyncio.sleep(0.1)


def summarize(
    load: Load, elapsed_s: float, before: dict[str, int], after: dict[str, int]
) -> dict[str, Any]:
    """Return everything the load found, as one JSON object."""
    turns = load.turns
    later = [turn for turn in turns if turn.turn > 1]
    judged = [turn for turn in turns if turn.is_right is not None]
    warm = [turn.is_warm for turn in turns if turn.is_warm is not None]
    is_balanced = after["violations"] == 0 and after["held"] <= before["held"]
    return {
        "ok": not load.errors and is_balanced,
        "interrupted": load.is_interrupted,
        "sessions": load.args.sessions,
        "turns": len(turns),
        "elapsed_s": elapsed_s,
        "turns_per_s": len(turns) / elapsed_s,
        "output_tokens_per_s": sum(turn.output_tokens for turn in turns) / elapsed_s,
        "ttft_ms": percentiles([t.ttft_ms for t in turns if t.ttft_ms is not None]),
        "inter_token_ms": percentiles([gap for turn in turns for gap in turn.gaps_ms]),
        "turn_ms": percentiles([turn.turn_ms for turn in turns]),
        "cached_share": share(
            sum(turn.cached_tokens for turn in later), sum(turn.input_tokens for turn in later)
        ),
        "warm_share": share(sum(warm), len(warm)),
        "right_share": right_share(judged),
        "right_share_undisturbed": right_share([t for t in judged if not t.is_behind_cancel]),
        "right_share_behind_cancel": right_share([t for t in judged if t.is_behind_cancel]),
        "injected": {
            "cancelled": sum(turn.outcome == "cancelled" for turn in turns),
            "disconnects": load.num_disconnects,
            "reconnects": load.num_reconnects,
        },
        "errors": dict(load.errors),
        "ledger": {"before": before, "after": after, "balanced": is_balanced},
        "samples": [[t.at_s, t.turn, t.ttft_ms, t.turn_ms, t.cached_tokens] for t in turns],
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p95, p99 by nearest rank; empty without values."""
    ranked = sorted(values)
    if not ranked:
        return {}
    return {f"p{p}": ranked[min(len(ranked) - 1, len(ranked) * p // 100)] for p in (50, 95, 99)}


def share(part: float, whole: float) -> float | None:
    """Return `part` / `whole`; None if `whole` is 0."""
    return part / whole if whole else None


def right_share(turns: Sequence[TurnRecord]) -> float | None:
    """Return the share of right answers among those checked; None without any."""
    return share(sum(turn.is_right is True for turn in turns), len(turns))


def show(report: dict[str, Any], console: Console) -> None:
    """Print the report."""
    table = Table("", "p50", "p95", "p99", title=f"{report['turns']} turns, milliseconds")
    for name in ("ttft_ms", "inter_token_ms", "turn_ms"):
        figures = report[name].values() or ("-", "-", "-")
        table.add_row(name.removesuffix("_ms"), *(f"{f:.1f}" if f != "-" else f for f in figures))
    console.print(table)

    def percent(name: str) -> str:
        return "-" if report[name] is None else f"{100 * report[name]:.2f} %"

    console.print(
        f"{report['turns_per_s']:.1f} turns/s, {report['output_tokens_per_s']:.0f} tokens/s out\n"
        f"{percent('cached_share')} of later inputs cached, {percent('warm_share')} of turns "
        f"computed new tokens only\n{percent('right_share')} of answers right"
    )
    if report["right_share"] is not None and report["right_share"] < 1.0:
        console.print(
            "a wrong answer is the model's and not an error: a canceled answer stays partly in the "
            f"history that the model reads ({percent('right_share_behind_cancel')} "
            f"right behind one, {percent('right_share_undisturbed')} elsewhere)"
        )
    injected = ", ".join(f"{count} {name}" for name, count in report["injected"].items())
    console.print(f"injected: {injected}")
    books, after = report["ledger"], report["ledger"]["after"]
    color = "green" if books["balanced"] else "red"
    console.print(
        f"[{color}]ledger: {after['held']} of {after['pages']} pages held after closing "
        f"({books['before']['held']} before), {after['violations']} violations in "
        f"{after['check_runs']} checks[/]"
    )
    for what, count in report["errors"].items():
        console.print(f"[red]error: {count} x {what}[/]")
    if report["interrupted"]:
        console.print("[yellow]interrupted[/]")
    console.print("[green]no errors[/]" if not report["errors"] else "[red]there were errors[/]")


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot the time to first token: over the run, by turn number, and as a distribution."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    samples = [sample for sample in report["samples"] if sample[2] is not None]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    over_time, by_turn, spread = figure.subplots(1, 3)
    over_time.plot([s[0] for s in samples], [s[2] for s in samples], ".", markersize=3)
    over_time.set(xlabel="seconds into the run", ylabel="TTFT, ms")
    by_turn.plot([s[1] for s in samples], [s[2] for s in samples], ".", markersize=3, alpha=0.5)
    by_turn.set(xlabel="turn of the session", ylabel="TTFT, ms")
    ranked = sorted(s[2] for s in samples)
    spread.plot(ranked, [(index + 1) / len(ranked) for index in range(len(ranked))])
    spread.set(xlabel="TTFT, ms", ylabel="share of turns", xscale="log")
    figure.suptitle(f"{report['sessions']} sessions, {report['turns']} turns")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
