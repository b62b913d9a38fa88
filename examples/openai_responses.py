"""Hold a conversation that the server keeps, with the `openai` package: over HTTP, and over one
WebSocket in lanes.

pip install openai websockets; session-server serve; python examples/openai_responses.py
"""

from __future__ import annotations

import argparse
import sys

try:
    import openai
    from openai.resources.responses.responses import ResponsesConnection
    from openai.types.responses import Response
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: pip install -U openai websockets")

QUESTIONS = ("My name is Ada.", "What is my name?", "My city is Oslo.", "What is my city?")


def main() -> None:
    """Ask every question over HTTP, then some in two lanes of a WebSocket."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--api-key", default="none", help="if the server asks for one")
    args = parser.parse_args()
    if "://" not in args.url:
        parser.error("give the address as http://HOST:PORT")
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key)
    try:
        model = next(iter(client.models.list())).id
        newest = converse(client, model)
        with client.responses.connect() as connection:
            branch(connection, model, newest)
    except openai.AuthenticationError as error:
        sys.exit(f"{error.message}: pass --api-key")
    except openai.APIConnectionError as error:
        why = error.__cause__ or error
        sys.exit(f"no answer from {args.url} ({why}): is a server running? `session-server serve`")


def converse(client: openai.OpenAI, model: str) -> str:
    """Ask one question after the other; what was said before is named, not sent."""
    previous = None
    for question in QUESTIONS:
        response = client.responses.create(
            model=model, input=question, previous_response_id=previous, temperature=0
        )
        show(question, response)
        previous = response.id
    assert previous is not None, "there are questions"
    return previous


def branch(connection: ResponsesConnection, model: str, previous: str) -> None:
    """Go on from one response in two lanes at once: each is a fork of the same history."""
    lanes = {"name": "What is my name?", "city": "What is my city?"}
    for lane, question in lanes.items():
        connection.response.create(
            model=model,
            input=question,
            previous_response_id=previous,
            stream_id=lane,
            temperature=0,
        )
    for event in connection:
        if event.type == "error":
            sys.exit(event.error.message)
        if event.type in ("response.incomplete", "response.failed"):
            sys.exit(f"an answer ended early: {event.type}")
        if event.type == "response.completed":
            lane = getattr(event, "stream_id", None) or ""
            show(f"[{lane}] {lanes.pop(lane)}", event.response)
        if not lanes:
            return


def show(question: str, response: Response) -> None:
    """Print an answer, and what its context cost."""
    usage = response.usage
    assert usage is not None, "this server always counts"
    cached = usage.input_tokens_details.cached_tokens
    print(f"> {question}\n{response.output_text}")
    print(f"  {cached} of {usage.input_tokens} tokens were cached\n")


if __name__ == "__main__":
    main()
