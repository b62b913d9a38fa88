"""`python -m tests.fuzz.published`: schemathesis against a server process, by its OpenAPI document.

What it draws from the schemas and beside them must be answered as the document says. Left out are
the route whose answer never ends, and two checks: that all that fits a schema is taken, because a
schema cannot say that one of three fields is given, or which model is served; and that what a POST
answers with exists from then on, because many POSTs here make nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from session_server.local_server import LocalServer

KEY = "secret"
FLAGS = ("--context-length", "96", "--threads", "1", "--log-level", "error", "--api-key", KEY)
NO_CHECKS = ("positive_data_acceptance", "ensure_resource_availability")
ENDLESS = "/v1/sessions/{session_id}/events"


def main() -> int:
    """Run it; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="drawn for each operation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with LocalServer(FLAGS) as server:
        options = (
            *("--header", f"Authorization: Bearer {KEY}", "--exclude-path", ENDLESS),
            *("--exclude-checks", ",".join(NO_CHECKS), "--request-timeout", "30"),
            *("--max-examples", str(args.examples), "--seed", str(args.seed)),
            *("--continue-on-failure", "--warnings", "off"),
        )
        program = Path(sys.executable).with_name("schemathesis")
        config = Path(__file__).with_name("schemathesis.toml")
        command = (program, "--config-file", config, "run", f"{server.url}/openapi.json", *options)
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
