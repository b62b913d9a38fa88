"""Serve a model over REST and WebSocket until SIGTERM or Ctrl-C, then drain.

Without --model-path it serves the embedded model. Flags have SGLang's names; a
flag of SGLang that has no effect here is accepted with a warning.
docs/limits.md says what happens at each limit.

examples:
  session-server serve                            the embedded model, port 30000
  session-server serve --model-path DIR --port 8000       your own checkpoint
  session-server serve --model-path DIR --context-length 8192 \\
      --max-total-tokens 200000                       limit the memory
"""

from __future__ import annotations

import argparse
import sys

from session_server import flags, wiring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server serve`."""
    flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve. Return 0 after a clean shutdown, 2 for invalid flags, 1 if serving failed."""
    try:
        settings = flags.read_settings(args)
    except ValueError as error:
        print(f"session-server serve: {error}", file=sys.stderr)
        return 2
    for name in flags.ignored_flags(args):
        print(f"warning: {name} has no effect here and is ignored", file=sys.stderr)
    return wiring.serve(settings)
