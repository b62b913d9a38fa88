"""Type into a session: every key is a draft, so the message is nearly computed when it is sent.

    session-server serve &
    python examples/typing_client.py "My name is Ada."

The server computes what stands there while nobody else needs it. `drafted` at the end is how many
tokens of the message were computed before it was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

try:
    from session_server.client import ClientError, ClientOptions, ConnectionLost, connect
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: run this with .venv/bin/python after `make install`")


async def main() -> None:
    """Type a question key by key, correct its first word, and ask it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default="My name is Ada.")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", help="if the server asks for one")
    parser.add_argument("--key-s", type=float, default=0.05, help="seconds between two keys")
    args = parser.parse_args()
    async with await connect(args.url, options=ClientOptions(token=args.api_key)) as session:
        for text in keys(args.question):
            draft_id = await session.draft(text)
            await asyncio.sleep(args.key_s)
        progress = await session.drafted(draft_id)
        print(f"> {args.question}  ({progress.processed} of {progress.total} computed)")
        result = await session.ask(args.question, sampling={"max_tokens": 32})
        print(result.text)
        used = result.usage
        print(f"cached {used.cached_tokens} of {used.input_tokens}, drafted {used.drafted_tokens}")


def keys(question: str) -> list[str]:
    """Return what stands there after each key: a wrong beginning, taken back, and the question."""
    wrong = [question[:2] + "x"[:end] for end in (1, 0)]
    return [*wrong, *(question[:end] for end in range(1, len(question) + 1))]


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ConnectionLost as error:
        raise SystemExit(f"{error}: is a server running? `session-server serve`") from None
    except ClientError as error:  # a wrong address, key or certificate
        raise SystemExit(str(error)) from None
