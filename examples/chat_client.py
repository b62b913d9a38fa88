"""Chat over `kvsession.v1` in about a hundred lines, with nothing but `websockets`.

    pip install websockets
    python examples/chat_client.py                  # what you type goes to the server
    python examples/chat_client.py --session s_...  # come back to a session, also after a crash

The protocol in short: connect to /v1/sessions/new/ws, wait for `session.opened`, send
`turn.create`, read `turn.delta` until `turn.completed`. Frames have a `seq`; a client that loses
the connection reconnects with the last one and gets the missed frames. The client chooses
`turn_id`, so sending a turn twice runs it once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import uuid
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

try:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed, InvalidStatus
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: pip install -U websockets")

TERMINAL = {"turn.completed", "turn.cancelled", "turn.failed"}
MAX_ATTEMPTS = 10


class Session:
    """Hold one session: its id, the last sequence number seen, and the socket."""

    def __init__(self, url: str, session_id: str, api_key: str | None) -> None:
        self.url = url.replace("http", "ws", 1)
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.session_id = session_id
        self.epoch: str | None = None
        self.seq = 0
        self.socket: Any = None

    async def attach(self) -> None:
        """Connect, or connect again where the last connection left off."""
        query = f"?after={self.seq}&epoch={self.epoch}" if self.epoch else ""
        self.socket = await connect(
            f"{self.url}/v1/sessions/{self.session_id}/ws{query}",
            subprotocols=["kvsession.v1"],  # type: ignore[list-item]
            additional_headers=self.headers,
            compression=None,
        )
        hello = json.loads(await self.socket.recv())
        if hello["type"] != "session.opened":
            raise SystemExit(f"refused: {hello['error']['code']}: {hello['error']['message']}")
        self.session_id, self.epoch = hello["session_id"], hello["epoch"]
        if not hello["resumed"]:
            self.seq = hello["seq"]

    async def frames(self, turn: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Send one turn and yield every frame until it has ended, however often the line drops."""
        attempts = 0
        while True:
            try:
                if self.socket is None:
                    await self.attach()
                await self.socket.send(json.dumps(turn))
                async for payload in self.socket:
                    attempts = 0
                    frame = json.loads(payload)
                    self.seq = max(self.seq, frame.get("seq", 0))
                    yield frame
                    if frame["type"] in TERMINAL or frame["type"] == "error":
                        return
            except (ConnectionClosed, OSError):
                attempts += 1
                if attempts > MAX_ATTEMPTS:
                    raise
                await asyncio.sleep(min(2.0, 0.1 * 2**attempts))
            self.socket = None

    async def ask(self, text: str) -> None:
        """Run one turn, print it as it comes, and print its usage."""
        turn = {
            "type": "turn.create",
            "turn_id": uuid.uuid4().hex,
            "input": [{"role": "user", "content": text}],
            "sampling": {"temperature": 0, "max_tokens": 256},
        }
        async for frame in self.frames(turn):
            if frame["type"] == "turn.delta":
                print(frame["text"], end="", flush=True)
            elif frame["type"] == "turn.completed":
                usage = frame["usage"]
                print(f"\n  [{usage['input_tokens']} in, {usage['cached_tokens']} of them cached]")
            elif "error" in frame:
                print(f"\n  [{frame['error']['code']}: {frame['error']['message']}]")


async def main() -> None:
    """Read lines and run each as a turn, until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key")
    parser.add_argument("--session", default="new", help="come back to this session")
    args = parser.parse_args()
    if "://" not in args.url:
        parser.error("argument --url: give it as http://HOST:PORT")
    session = Session(args.url, args.session, args.api_key)
    await session.attach()
    print(
        f"session {session.session_id}; an empty line, Ctrl-D or Ctrl-C ends the program, "
        "not the session",
        flush=True,
    )
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        await session.ask(line)
    await session.socket.close()


def refusal(error: InvalidStatus) -> str:
    """Return why the server refused the socket, in its own words if it has some."""
    advice = "; pass --api-key" if error.response.status_code == HTTPStatus.UNAUTHORIZED else ""
    try:
        return f"refused: {json.loads(error.response.body or b'')['error']['message']}{advice}"
    except (ValueError, KeyError, TypeError):  # another kind of server
        return f"refused: {error}{advice}"


if __name__ == "__main__":
    # asyncio would wait for the thread that reads the terminal, until Enter is pressed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        asyncio.run(main())
    except InvalidStatus as error:
        raise SystemExit(refusal(error)) from None
    except OSError as error:
        raise SystemExit(f"{error}: is a server running? `session-server serve`") from None
