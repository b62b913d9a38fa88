"""Talk as over a microphone: words arrive one by one, and who speaks up is listened to.

    session-server serve &
    python examples/voice_like.py

What a recognizer has heard so far is a draft, so a question is nearly computed when its last word
is said. Who speaks while an answer is spoken cuts it short: the turn is canceled, what was said of
it stays in the history, and the new words are the next turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

try:
    from session_server.client import (
        ClientError,
        ClientOptions,
        ConnectionLost,
        SessionClient,
        TurnHandle,
        TurnText,
        connect,
    )
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: run this with .venv/bin/python after `make install`")

LONG = "Count from 1 to 1000."
"""The embedded model counts badly, but for long enough to be interrupted."""

SPOKEN_BEFORE_BARGE_IN = 12
"""Pieces of the long answer that are heard before somebody speaks up."""


async def main() -> None:
    """Say something, ask for a long answer, cut it short, and see what is remembered."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key", help="if the server asks for one")
    parser.add_argument("--word-s", type=float, default=0.2, help="seconds between two words")
    args = parser.parse_args()
    async with await connect(args.url, options=ClientOptions(token=args.api_key)) as session:
        await speak(await listen(session, "My name is Ada.", args.word_s))
        counting = await listen(session, LONG, args.word_s)
        await speak(counting, up_to=SPOKEN_BEFORE_BARGE_IN)
        # Both at once: the draft waits for the cut, and is computed before the sentence is over.
        await counting.cancel(keep_partial=True)
        question = await listen(session, "What is my name?", args.word_s)
        cut = await counting.result()
        print(f"[{cut.status}; {cut.usage.output_tokens} tokens of it were computed]")
        await speak(question)


async def listen(session: SessionClient, sentence: str, word_s: float) -> TurnHandle:
    """Hear a sentence word by word, and start the turn that answers it."""
    words = sentence.split(" ")
    for end in range(1, len(words)):
        await session.draft(" ".join(words[:end]))
        await asyncio.sleep(word_s)
    print(f"> {sentence}")
    return await session.start(sentence, sampling={"temperature": 0, "max_tokens": 1000})


async def speak(turn: TurnHandle, *, up_to: int | None = None) -> None:
    """Speak an answer as it comes; stop in the middle after so many pieces."""
    num_pieces = 0
    async for event in turn:
        if isinstance(event, TurnText):
            print(event.text, end="", flush=True)
            num_pieces += 1
        if num_pieces == up_to:
            print(" --")
            return
    used = (await turn.result()).usage
    print(
        f"\n  [{used.cached_tokens} of {used.input_tokens} cached, {used.drafted_tokens} drafted]"
    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ConnectionLost as error:
        raise SystemExit(f"{error}: is a server running? `session-server serve`") from None
    except ClientError as error:  # a wrong address, key or certificate
        raise SystemExit(str(error)) from None
