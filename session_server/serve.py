"""Serve a model over REST and WebSocket until SIGTERM or Ctrl-C, then drain.

Without --model-path the embedded model is served. Flags have the names SGLang users know; one of
SGLang's that means nothing here is accepted with a warning line.
"""

from __future__ import annotations

import argparse
import sys

from session_server import flags, wiring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `session-server serve`."""
    flags.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve. Returns 0 after a clean shutdown, 2 for wrong flags, 1 when serving failed."""
    try:
        settings = flags.read_settings(args)
    except ValueError as error:
        print(f"session-server serve: {error}", file=sys.stderr)
        return 2
    for name in flags.meaningless(args):
        print(f"warning: {name} means nothing here and is ignored", file=sys.stderr)
    return wiring.serve(settings)
