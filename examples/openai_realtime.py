"""Hold a conversation over OpenAI's Realtime with the `openai` package: each response computes what
is new. When the connection is lost, it comes back and misses nothing.

pip install "openai[realtime]"; session-server serve; python examples/openai_realtime.py
"""

from __future__ import annotations

import argparse
import secrets
import sys

try:
    import openai
    from openai.resources.realtime.realtime import RealtimeConnection
    from openai.types.websocket_reconnection import ReconnectingEvent, ReconnectingOverrides
    from websockets.exceptions import InvalidStatus
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: pip install -U 'openai[realtime]'")

QUESTIONS = ("My name is Ada.", "What is my name?", "My city is Oslo.", "What is my city?")


def main() -> None:
    """Ask every question, and show how many tokens of each context were there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--api-key", default="none", help="if the server asks for one")
    args = parser.parse_args()
    if "://" not in args.url:
        parser.error("give the address as http://HOST:PORT")
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key)
    try:
        Conversation(client).run()
    except InvalidStatus as error:
        sys.exit(f"{(error.response.body or b'').decode()}\nIf it asks for a key: --api-key")
    except OSError as error:
        sys.exit(
            f"no answer from {args.url} ({error}): is a server running? `session-server serve`"
        )


class Conversation:
    """One conversation, whatever happens to its connections. `seen`: the last event that came."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client = client
        self.session_id = f"ada-{secrets.token_hex(8)}"
        self.seen = ""

    def run(self) -> None:
        """Ask one question after the other."""
        with self.client.realtime.connect(
            extra_query={"session_id": self.session_id}, on_reconnecting=self.come_back
        ) as connection:
            connection.session.update(session={"type": "realtime", "instructions": "Be brief."})
            for question in QUESTIONS:
                print(f"> {question}")
                self.ask(connection, question)

    def come_back(self, _: ReconnectingEvent) -> ReconnectingOverrides:
        """Say what the next connection is to go on from."""
        query = {"session_id": self.session_id, "last_event_id": self.seen}
        return {"extra_query": query}

    def ask(self, connection: RealtimeConnection, question: str) -> None:
        """Ask, and print the answer while it comes."""
        connection.conversation.item.create(
            item={
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": question}],
            }
        )
        connection.response.create()
        for event in connection:
            self.seen = str(event.to_dict()["event_id"])
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
            elif event.type == "error":
                sys.exit(event.error.message)
            elif event.type == "response.done":
                usage = event.response.usage
                assert usage is not None, "this server always counts"
                assert usage.input_token_details is not None
                cached = usage.input_token_details.cached_tokens
                print(f"\n  {cached} of {usage.input_tokens} tokens were cached\n")
                return


if __name__ == "__main__":
    main()
