"""Chat with a server in the terminal.

Ctrl-C while an answer streams cancels that turn and keeps the partial answer;
at the prompt it exits. A line after each answer shows its cost: `cached` grows
with the session. Pasted lines are sent as one turn. A conversation stays on a
server that keeps sessions on disk; the last line says how to go on with it.
Without --url it ends with the server that was started for it.

examples:
  session-server chat                start a server with the embedded model
  session-server chat --url http://127.0.0.1:30000
  session-server chat --url http://127.0.0.1:30000 --session ID    resume
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from types import FrameType
from typing import Final, Self, TypeVar, assert_never

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from session_server.arguments import add_server, number, whole_number
from session_server.client import (
    ClientError,
    ClientOptions,
    ConnectionState,
    Refused,
    SessionClient,
    TurnHandle,
    TurnReplaced,
    TurnResult,
    TurnText,
    connect,
)
from session_server.core.child_process import called_as
from session_server.core.owner import KEY_VARIABLE
from session_server.core.sampling import MAX_OUTPUT_TOKENS
from session_server.core.session_events import ChatInput, Message
from session_server.local_server import LocalServer
from session_server.past import past_lines
from session_server.terminal import SERVER_FAILURES, make_table, print_failure, printable

T = TypeVar("T")

PROMPT: Final = "you > "

LOST_NOTICE_DELAY_S: Final = 0.5
"""Seconds after which a lost connection is reported; the user need not see shorter losses."""

MAX_ATTEMPTS: Final = 1000
"""Attempts to reconnect to a lost server, for about half an hour."""

HELP: Final = """\
/new             start a new session without history
/system TEXT     start a new session with this system prompt
/stats           show what the turns of this session cost
/help            show this list
/paste           send several lines as one turn; end with a line of one dot
/quit, /exit     exit (so do Ctrl-D, and Ctrl-C at the prompt): a session stays if
                 it was resumed, or if the server keeps it on disk
/keep            exit, and keep the session on the server of --url until it expires
/forget          exit, and delete the session
Ctrl-C while an answer streams cancels the turn and keeps the partial answer."""

ENDS_WITH_SERVER: Final = """\
this conversation has ended with its server; to keep one, start a server that stays:
  {0} serve
  {0} chat --url http://127.0.0.1:30000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `chat`."""
    add_server(parser, about="URL of a running server; by default one is started on this machine")
    talk = parser.add_argument_group("conversation", "Choose the session and how it answers.")
    talk.add_argument("--session", metavar="ID", help="resume this session instead of a new one")
    talk.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    talk.add_argument(
        "--max-tokens",
        type=whole_number(1, MAX_OUTPUT_TOKENS),
        metavar="N",
        default=256,
        help="limit the tokens of one answer (default: 256)",
    )
    talk.add_argument(
        "--temperature",
        type=number(0, 100),
        metavar="X",
        default=0.0,
        help="sampling temperature (default: 0, greedy)",
    )


def run(args: argparse.Namespace) -> int:
    """Chat until the user leaves. Return the exit status."""
    console = _Console()
    if args.session is not None and not args.url:
        print(
            "session-server chat: --session needs --url http://HOST:PORT of its server",
            file=sys.stderr,
        )
        return 2
    try:
        with nullcontext(None) if args.url else _start_server(console) as server:
            url = args.url or (server.url if server else "")
            _edit_lines()
            with _LoopThread() as loop:
                return _Chat(console, args, url, loop).run()
    except SERVER_FAILURES as error:
        status = print_failure(error, console, key=args.api_key)
        if isinstance(error, Refused) and error.code == "session_not_found":
            console.print("without --session a new session begins; GET /v1/sessions lists yours")
        return status


def describe(result: TurnResult) -> str:
    """Format what a turn cost: `in 640 (480 cached, 160 new) · out 32 · ttft 24 ms · ...`."""
    usage, timings = result.usage, result.timings
    parts = [
        f"in {usage.input_tokens} ({usage.cached_tokens} cached, {usage.cache_write_tokens} new)",
        f"out {usage.output_tokens}",
        f"ttft {timings.ttft_ms:.0f} ms",
    ]
    if timings.decode_ms > 0 and usage.output_tokens > 1:
        parts.append(f"{1000 * (usage.output_tokens - 1) / timings.decode_ms:.0f} tok/s")
    if result.status != "completed":
        parts.append(result.status)
    elif result.finish_reason == "length":
        parts.append("cut at max tokens")
    return " · ".join(parts)


def _edit_lines() -> None:
    """Give `input` line editing and history, and make pasted lines one input."""
    with suppress(ImportError):
        import readline

        # Python turns bracketed paste off. Libraries without it ignore the line.
        readline.parse_and_bind("set enable-bracketed-paste on")


def _start_server(console: Console) -> LocalServer:
    console.print("[dim]starting a server with the embedded model ...[/]")
    return LocalServer()


class _Console(Console):
    """Raise BrokenPipeError where the reader of the output has left, which ends any command.

    SystemExit, the default, would end the thread of the loop while the main thread waits for it.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class _LoopThread:
    """Run an event loop in a thread, so that the socket is served while the user types."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="client", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.close()  # what still reads is canceled before the loop is gone

    def call(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop and wait for it here, so that Ctrl-C raises
        KeyboardInterrupt.
        """
        return self.submit(coroutine).result()

    def submit(self, coroutine: Coroutine[object, object, T]) -> Future[T]:
        """Run a coroutine on the loop without waiting for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _Chat:
    """Read lines on the main thread and run turns on the loop's thread."""

    def __init__(
        self, console: Console, args: argparse.Namespace, url: str, loop: _LoopThread
    ) -> None:
        self._console = console
        self._args = args
        self._url = url
        self._loop = loop
        self._system: str = args.system
        self._turns: list[TurnResult] = []
        self._is_resumed = False
        self._is_at_prompt = False
        self._lost_timer: asyncio.TimerHandle | None = None
        self._is_lost_reported = False
        self._session = self._open(args.session)

    def run(self) -> int:
        """Run lines until the user leaves. Return the exit status."""
        session_id = self._session.session_id
        opening = f"[dim]session {session_id} on {self._url}\n/help for help[/]"
        self._console.print(opening, highlight=False)
        if self._is_resumed:
            self._show_past()
        try:
            while True:
                line = self._read_line()
                if line is None or line in {"/quit", "/exit", "/keep", "/forget"}:
                    break
                self._run_line(line)
        except KeyboardInterrupt:
            # Whoever interrupts leaves, whether the server still answers or not.
            with suppress(ClientError):
                self._part(is_kept=self._stays, timeout_s=1.0)
            return 130
        self._part(is_kept=line == "/keep" or (line != "/forget" and self._stays))
        if not self._args.url and (self._turns or line == "/keep"):
            self._console.print(ENDS_WITH_SERVER.format(called_as()), soft_wrap=True)
        return 0

    def _show_past(self) -> None:
        """Show how much is gone on from, and what was said last."""
        key, trust = self._args.api_key, self._args.trust
        for line in past_lines(self._url, self._session.session_id, key=key, trust=trust):
            shown = f"[dim]{escape(printable(line))}[/]"
            self._console.print(shown, highlight=False, soft_wrap=True)

    @property
    def _stays(self) -> bool:
        """Return whether the session is left on the server unless the user says otherwise: somebody
        else has opened it, or the server keeps what was said on disk."""
        is_stored = any(turn.is_durable is not None for turn in self._turns)
        return self._is_resumed or is_stored

    def _part(self, *, is_kept: bool, timeout_s: float = 10.0) -> None:
        """Leave the session and say how to go on with it, or delete it."""
        # A server of the chat's own ends with it.
        is_there = is_kept and not self._session.is_over and bool(self._args.url)
        session = self._session
        self._loop.call(
            _leave(session, timeout_s) if is_kept else session.close(timeout_s=timeout_s)
        )
        if is_there:
            kept = f"kept: {session.session_id}\nresume it: "
            kept += _resume_command(self._args, session.session_id)
            self._console.print(escape(kept), highlight=False, soft_wrap=True)

    def _read_line(self) -> str | None:
        """Read one line. Return None at the end of input or at Ctrl-C."""
        self._is_at_prompt = True
        try:
            return input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        finally:
            self._is_at_prompt = False

    def _read_paste(self) -> str:
        lines = []
        while True:
            try:
                line = input()
            except EOFError:
                break
            if line.strip() == ".":
                break
            lines.append(line)
        return "\n".join(lines).strip()

    def _run_line(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                return
            case "/help":
                self._console.print(escape(HELP))
            case "/stats":
                self._console.print(_cost_table(self._turns))
            case "/paste":
                if text := self._read_paste():
                    self._take_turn(text)
            case "/new" | "/system":
                self._system = rest if command == "/system" else self._system
                self._part(is_kept=self._stays)
                self._session = self._open(None)
                self._console.print(f"[dim]session {self._session.session_id}[/]")
            case _ if command.startswith("/"):
                self._console.print(f"[yellow]no such command: {escape(command)}; see /help[/]")
            case _:
                self._take_turn(line)

    def _open(self, session_id: str | None) -> SessionClient:
        self._turns, self._is_resumed = [], session_id is not None
        options = ClientOptions(
            token=self._args.api_key,
            trust=self._args.trust,
            max_attempts=MAX_ATTEMPTS,
            on_connection=self._on_line,
        )
        return self._loop.call(connect(self._url, session_id=session_id, options=options))

    def _take_turn(self, text: str) -> None:
        messages = [Message("user", text)]
        if self._system and not self._turns:
            messages.insert(0, Message("system", self._system))
        sampling = {"max_tokens": self._args.max_tokens, "temperature": self._args.temperature}
        try:
            if self._session.is_over:
                self._reopen()
            turn = self._loop.call(
                self._session.start(ChatInput(tuple(messages)), sampling=sampling)
            )
            result = self._wait(turn)
        except ClientError as error:
            self._console.print(f"[red]{escape(printable(str(error)))}[/]")
            if self._session.is_over:
                self._console.print("[yellow]your next line starts a new session[/]")
            return
        self._turns.append(result)
        if result.error is not None:
            failure = f"{result.error.code}: {result.error.message}"
            self._console.print(f"[red]{escape(printable(failure))}[/]")
        self._console.print(f"[dim]{describe(result)}[/]", highlight=False)

    def _reopen(self) -> None:
        """Open a new session in place of one that is gone. Raises ClientError."""
        self._session = self._open(None)
        text = f"session {self._session.session_id}: earlier turns are lost"
        self._console.print(f"[yellow]{text}[/]", highlight=False)

    def _on_line(self, state: ConnectionState) -> None:
        """Report a lost or restored connection; runs on the event loop's thread."""
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None
        match state:
            case ConnectionState.LOST:
                loop = asyncio.get_running_loop()
                self._lost_timer = loop.call_later(LOST_NOTICE_DELAY_S, self._report_lost)
            case ConnectionState.BACK:
                if self._is_lost_reported:
                    self._is_lost_reported = False
                    self._print_notice("connected again")
            case _:
                assert_never(state)

    def _report_lost(self) -> None:
        self._is_lost_reported = True
        self._print_notice("connection lost, trying again; press Ctrl-C twice to exit")

    def _print_notice(self, text: str) -> None:
        """Print a notice, and the prompt again if the user is at it."""
        self._console.print(f"\n[yellow]({text})[/]", highlight=False)
        if self._is_at_prompt:
            self._console.out(PROMPT, end="", highlight=False)

    def _wait(self, turn: TurnHandle) -> TurnResult:
        """Wait for a turn. The first Ctrl-C cancels it; a second one before its end exits.

        The handler is installed before the first text is printed, so that any visible turn can be
        canceled.
        """

        def cancel(number: int, frame: FrameType | None) -> None:
            del number, frame
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._loop.submit(turn.cancel(keep_partial=True))

        before = signal.signal(signal.SIGINT, cancel)
        try:
            return self._loop.submit(self._stream(turn)).result()
        finally:
            signal.signal(signal.SIGINT, before)

    async def _stream(self, turn: TurnHandle) -> TurnResult:
        self._console.print("[bold cyan] it >[/] ", end="")
        is_thinking = False
        async for event in turn:
            if isinstance(event, TurnText):
                self._console.out(printable(event.reasoning), style="dim", end="", highlight=False)
                if is_thinking and event.text:
                    self._console.print("\n")
                is_thinking = bool(event.reasoning) or (is_thinking and not event.text)
                self._console.out(printable(event.text), end="", highlight=False)
            elif isinstance(event, TurnReplaced) and not (event.text or event.reasoning):
                self._print_notice("the server had lost this answer: it begins anew")
            elif isinstance(event, TurnReplaced):
                self._console.out(
                    f"\n(reconnected) {printable(event.text)}", end="", highlight=False
                )
        self._console.print()
        result = await turn.result()
        for call in result.tool_calls:
            self._console.print(
                f"[dim]calls {escape(printable(f'{call.name}({call.arguments})'))}[/]"
            )
        return result


async def _leave(session: SessionClient, timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await session.leave()


def _resume_command(args: argparse.Namespace, session_id: str) -> str:
    """Return the command that goes on with a session; it does not show the key."""
    key = f"{KEY_VARIABLE}=KEY " if args.api_key else ""
    trust = ["--ca-file", args.ca_file] if args.ca_file else []
    flags = shlex.join(["chat", "--url", args.url, *trust, "--session", session_id])
    return f"{key}{called_as()} {flags}"


def _cost_table(turns: list[TurnResult]) -> Table:
    columns = ("turn", "in", "cached", "new", "out", "ttft ms", "forward ms", Column("end"))
    rows = (
        (
            number,
            turn.usage.input_tokens,
            turn.usage.cached_tokens,
            turn.usage.cache_write_tokens,
            turn.usage.output_tokens,
            f"{turn.timings.ttft_ms:.0f}",
            f"{turn.timings.forward_ms:.0f}",
            turn.finish_reason or turn.status,
        )
        for number, turn in enumerate(turns, start=1)
    )
    return make_table(columns, rows)
