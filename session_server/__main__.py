"""`python -m session_server` is the command line."""

from session_server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
