"""Run the command line for `python -m session_server`."""

from session_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
