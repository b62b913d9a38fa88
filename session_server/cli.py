"""Run the command line: `session-server serve`, `chat`, `demo`, `keys` and the others.

A subcommand's module is imported only when it is called, so `--help` is fast and `chat` does not
load torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType
from typing import Final

from session_server.arguments import CommandParser
from session_server.foreign_flags import explain_unknown_flags

_EPILOG: Final = """\
first steps:
  session-server doctor                   check what this machine has
  session-server demo                     run many conversations and check every answer
  session-server serve                    serve the embedded model on http://127.0.0.1:30000
  session-server chat --url http://127.0.0.1:30000    chat with that server
  session-server chat                     chat with a server of its own
  session-server serve --model-path DIR   serve a Hugging Face checkpoint, or a GGUF file
  session-server inspect DIR              estimate its memory without loading it
"""


@dataclass(frozen=True, slots=True)
class Subcommand:
    """Name the module of a subcommand, with `add_arguments(parser)` and `run(args) -> int`.

    `positional`: its positional arguments, as the usage line shows them.
    """

    module: str
    summary: str
    positional: str = ""


COMMANDS: Final[Mapping[str, Subcommand]] = {
    "serve": Subcommand("session_server.serve", "serve a model: REST, WebSocket, SGLang's routes"),
    "chat": Subcommand("session_server.chat", "chat with a server in the terminal"),
    "demo": Subcommand("session_server.demo.command", "run conversations and check the answers"),
    "bench": Subcommand("session_server.bench.command", "measure what sessions cost", "BENCHMARK "),
    "inspect": Subcommand(
        "session_server.inspector.command",
        "describe a checkpoint and the memory its sessions need",
        "[MODEL] ",
    ),
    "audit": Subcommand("session_server.auditor", "show sessions and memory of a running server"),
    "keys": Subcommand(
        "session_server.key_command",
        "add, list and revoke the API keys of a file",
        "ACTION [NAME] [OPTION=VALUE ...] ",
    ),
    "sessions": Subcommand(
        "session_server.session_command",
        "list, show, move and delete the sessions of a store",
        "ACTION [ID ...] ",
    ),
    "cluster": Subcommand(
        "session_server.deploy.command", "run several replicas under Ray Serve", "ACTION "
    ),
    "doctor": Subcommand("session_server.doctor", "check whether this machine can serve"),
}

_CHILDREN: Final[Mapping[str, tuple[str, str]]] = {
    "_engine": ("session_server.engine_wiring", "run_engine_process"),
    "_rank": ("session_server.parallel.rank", "run_rank"),
    "_grammar": ("session_server.text.grammar_child", "serve_grammars"),
    "_template": ("session_server.text.template_child", "serve_template"),
}
"""Processes that only the server starts, with the number of an open socket: module and function."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return its exit status: 2 for invalid arguments, 130 after Ctrl-C."""
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            _flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()  # its reader has left
        return 1


def _flush() -> None:
    """Write what was printed, or end with a line that says why that cannot be done. Raises
    BrokenPipeError, SystemExit."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        sys.exit(f"session-server: what it prints cannot be written: {error.strerror}")


def _drop_output() -> None:
    """Have the rest of the output go nowhere: the interpreter flushes once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _imported(name: str) -> ModuleType:
    """Import a module, and look for no garbage meanwhile: what is imported stays, and to look at it
    again and again is a sixth of the start of an engine."""
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in _CHILDREN:
        module_name, serve = _CHILDREN[arguments[0]]
        return int(getattr(_imported(module_name), serve)(int(arguments[1])))
    asked = next((word for word in arguments if not word.startswith("-")), None)
    parser = CommandParser(
        prog="session-server",
        usage="session-server COMMAND [flags]",
        description="A streaming-session LLM server: a turn costs what its new tokens cost.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("session-server"))
    commands = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        required=True,
        prog="session-server",
        parser_class=CommandParser,
    )
    run: Callable[[argparse.Namespace], int] | None = None
    for name, command in COMMANDS.items():
        module = _imported(command.module) if name == asked else None
        description = module.__doc__ if module is not None else None
        subparser = commands.add_parser(
            name,
            help=command.summary,
            usage=f"session-server {name} {command.positional}[flags]",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if module is not None:
            module.add_arguments(subparser)
            run = module.run
    args, surplus = parser.parse_known_args(arguments)
    assert run is not None, "argparse rejects arguments without a command"
    if "words" in args and not any(word.startswith("-") for word in surplus):
        # argparse takes words of an action only where they stand together, before the flags.
        args.words, surplus = [*args.words, *surplus], []
    if surplus:
        chosen = commands.choices[args.command]
        chosen.error(
            explain_unknown_flags(
                surplus, chosen.flags, is_server=args.command in ("serve", "cluster")
            )
        )
    return run(args)
