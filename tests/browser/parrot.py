"""`python -m tests.browser.parrot` serves a model that says what it is asked to say, at its pace.

The server is the real one over an engine on paper, on a port of its own, so that a test can have
any answer: `Say X` is answered with X, control tokens included (a call of a tool, a thought), the
result of a tool with that result, and anything else with its repetition. Asked to go on from what
it would not have said, it says `, and so on.`
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence

from session_server.sessions.manager import SessionManager
from session_server.sessions.salts import TenantSalts
from session_server.text.model_text import ModelText
from tests.sessions.paper_engine import PaperEngine
from tests.sessions.world import model_text
from tests.web.serving import serving_over

CONTEXT_LEN = 131_072


class Parrot:
    """The next token after a context of this model's."""

    def __init__(self, text: ModelText) -> None:
        self._tokenizer = text.tokenizer
        self._start = text.tokenizer.vocabulary["<|im_start|>"]
        self._end = max(text.eos_token_ids)
        self._roles = {
            role: text.tokenizer.encode_content(f"{role}\n") for role in ("user", "assistant")
        }

    def __call__(self, context: list[int]) -> int:
        """Say the next token of the answer."""
        begin = self._last("assistant", context)
        asked = context[self._last("user", context) :]
        question = self._tokenizer.decode(asked[: asked.index(self._end)])
        said = context[begin:]
        answer = [*self._tokenizer.encode_control(_answer(question)), self._end]
        if said != answer[: len(said)]:
            answer = [*self._tokenizer.encode_content(", and so on."), self._end]
            kept = max(n for n in range(len(answer)) if n == 0 or said[-n:] == answer[:n])
            return answer[kept]
        return answer[len(said)]

    def _last(self, role: str, context: Sequence[int]) -> int:
        """Where the last message of a role begins, behind its head."""
        head = [self._start, *self._roles[role]]
        places = range(len(context) - len(head), -1, -1)
        found = next(at for at in places if list(context[at : at + len(head)]) == head)
        return found + len(head)


def _answer(question: str) -> str:
    _, is_told, told = question.partition("Say ")
    if "<tool_response>" in question:
        inner = question.partition("<tool_response>")[2].partition("</tool_response>")[0]
        return f"The tool says: {inner.strip()}"
    return told if is_told else f"You said: {question}"


class PacedEngine(PaperEngine):
    """Takes a step when one is due; between two of them it looks idle."""

    pace_s = 0.0
    next_s = 0.0

    def step(self) -> None:
        """Step, if it is time."""
        if time.monotonic() >= self.next_s:
            self.next_s = time.monotonic() + self.pace_s
            super().step()

    @property
    def is_busy(self) -> bool:
        """Whether a step is due and would do something."""
        return time.monotonic() >= self.next_s and super().is_busy


async def main(port: int, tokens_per_s: int, tokens_per_step: int) -> None:
    """Serve until SIGTERM."""
    text = model_text("thinking_tools")
    engine = PacedEngine(
        vocab_size=len(text.tokenizer.vocabulary),
        eos_ids=tuple(sorted(text.eos_token_ids)),
        max_turn_len=CONTEXT_LEN,
        next_token=Parrot(text),
        tokens_per_step=tokens_per_step,
    )
    engine.pace_s = tokens_per_step / tokens_per_s
    manager = SessionManager(engine, text, salts=TenantSalts(bytes(32)))
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    async with serving_over(engine, manager) as this:
        print(f"listening on {this.url}", flush=True)
        await is_over.wait()
    await text.grammars.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Serve a model that says what it is asked to.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens-per-s", type=int, default=250)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    options = parser.parse_args()
    asyncio.run(main(options.port, options.tokens_per_s, options.tokens_per_step))
