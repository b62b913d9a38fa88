"""Serve a model over REST and WebSocket until SIGTERM or Ctrl-C, then drain.

Without --model-path it serves the embedded model. Flags have SGLang's names; a
flag of SGLang that has no effect here is accepted with a warning.
Each is also a key of a TOML file (--config) and a variable such as
SESSION_SERVER_HTTP__PORT; flags win over variables, variables over the file.
A SIZE is bytes, or as 512MiB and 1GiB.
docs/runbook.md has the names, docs/limits.md what happens at each limit.

examples:
  session-server serve                            the embedded model, port 30000
  session-server serve --model-path DIR --port 8000       your own checkpoint
  session-server serve --model-path model.gguf            a GGUF file
  session-server serve --model-path DIR --context-length 8192 \\
      --max-total-tokens 200000                       limit the memory
  session-server serve --config FILE --print-config       what a file gives
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from session_server import flags, serving, sources, wiring
from session_server.core.owner import KEY_VARIABLE
from session_server.web.key_file import is_readable_by_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server serve`."""
    group = parser.add_argument_group("configuration", "Say where settings come from.")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file of settings (default: ${sources.CONFIG_VARIABLE}, or none)",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings and where each comes from, as such a file, and exit",
    )
    flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve. Return 0 after a clean shutdown, 2 for invalid settings, 1 if serving failed, 3 if
    sessions are lost that could not be written."""
    try:
        sourced = read(args)
    except ValueError as error:
        print(f"session-server serve: {error}", file=sys.stderr)
        return wiring.EXIT_UNUSABLE
    if args.print_config:
        print(sources.shown_settings(sourced, has_variable_key=KEY_VARIABLE in os.environ))
        return wiring.EXIT_OK
    return serving.serve(sourced.settings, worded=sourced.worded)


def read(args: argparse.Namespace) -> sources.Sourced:
    """Return the settings that flags, variables and file give, after printing what to beware of.
    Raises ValueError."""
    given = flags.given_by(args)
    sourced = sources.read_sources(given, environment=os.environ, file=args.config)
    for warning in (*_ignored(args), *_exposed_keys(sourced)):
        print(f"warning: {warning}", file=sys.stderr)
    return sourced


def _ignored(args: argparse.Namespace) -> Iterator[str]:
    for name in flags.ignored_flags(args):
        yield f"{name} has no effect here and is ignored"


def _exposed_keys(sourced: sources.Sourced) -> Iterator[str]:
    """Say which key others on this machine can read."""
    if sourced.origins.get(sources.KEY_PLACE) == "--api-key":
        instead = f"use --api-key-file or {KEY_VARIABLE}"
        yield f"every user of this machine can see --api-key with ps: {instead}"
    if sourced.file is not None and sourced.has_key_in_file and is_readable_by_all(sourced.file):
        yield f"every user of this machine can read the key in {sourced.file}: chmod 600 it"
