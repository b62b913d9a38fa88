"""Use sessions over plain HTTP, with nothing but `httpx`: open, ask, stream, close.

    pip install httpx
    python examples/rest_client.py

The second answer needs what the first turn said, and its `usage` shows that only the new tokens
were computed: `cached_tokens` is the whole history.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

try:
    import httpx
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: pip install -U httpx")


def main() -> None:
    """Run a conversation of three turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key")
    args = parser.parse_args()
    if "://" not in args.url:
        parser.error("argument --url: give it as http://HOST:PORT")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with httpx.Client(base_url=args.url, headers=headers, timeout=120.0) as http:
        session = opened(http)
        print(f"session {session}")
        for text in ("My name is Ada.", "What is my name?"):
            print_turn(text, ask(http, session, text))
        print("> Count from 1 to 5.")
        for event, body in stream(http, session, "Count from 1 to 5."):
            if event == "turn.delta":
                print(body["text"], end="", flush=True)
        print()
        http.delete(f"/v1/sessions/{session}").raise_for_status()


def opened(http: httpx.Client) -> str:
    """Open a session that expires after ten idle minutes, and return its id."""
    answer = http.post("/v1/sessions", json={"ttl_s": 600})
    answer.raise_for_status()
    return str(answer.json()["id"])


def ask(http: httpx.Client, session: str, text: str) -> dict[str, Any]:
    """Run one turn and wait for it. The body has `item`, `usage` and `timings`."""
    answer = http.post(f"/v1/sessions/{session}/turns", json=turn_body(text))
    answer.raise_for_status()
    body: dict[str, Any] = answer.json()
    return body


def stream(http: httpx.Client, session: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one turn and yield its server-sent events as (type, body)."""
    with http.stream(
        "POST",
        f"/v1/sessions/{session}/turns",
        json=turn_body(text),
        headers={"Accept": "text/event-stream"},
    ) as answer:
        if answer.is_error:
            answer.read()  # its message
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                body = json.loads(line.removeprefix("data: "))
                yield body["type"], body


def turn_body(text: str) -> dict[str, Any]:
    """Return the body of a greedy turn with one user message."""
    return {
        "input": [{"role": "user", "content": text}],
        "sampling": {"temperature": 0, "max_tokens": 64},
    }


def refusal(answer: httpx.Response) -> str:
    """Return why the server refused a request, in its own words if it has some."""
    advice = "; pass --api-key" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
    try:
        return f"refused: {answer.json()['error']['message']}{advice}"
    except (ValueError, KeyError, TypeError):  # another kind of server
        return f"refused: {answer.status_code} {answer.reason_phrase}{advice}"


def print_turn(text: str, body: dict[str, Any]) -> None:
    """Print the question, the answer and the usage."""
    usage = body["usage"]
    print(f"> {text}\n{body['item']['content']}")
    print(f"  [{usage['input_tokens']} in, {usage['cached_tokens']} of them cached]")


if __name__ == "__main__":
    try:
        main()
    except httpx.HTTPStatusError as error:
        raise SystemExit(refusal(error.response)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except httpx.TransportError as error:
        raise SystemExit(f"{error}: is a server running? `session-server serve`") from None
