"""The chat page as a person uses it: by what its controls are called."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from playwright.sync_api import Locator, Page, expect

from tests.browser.conftest import PATIENCE_MS, Tab
from tests.browser.witness import Witness

LONG = "Say " + " ".join(f"word{number}" for number in range(100))
"""A question to the parrot that takes it some seconds to answer."""

RICH = """# A head

A paragraph with **weight**, `code` and [a link](https://example.org/).

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
for n in range(2):
    print("n", n)
```

> quoted"""
"""An answer with a bit of everything."""

SEND = re.compile("^(Send|Queue)$")
ANSWER = re.compile("^Answer")
ENDS = ("turn.completed", "turn.cancelled", "turn.failed")


class Chat:
    """One tab with the chat page in it."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self.page: Page = tab.page
        self.witness: Witness = tab.witness
        expect(self.message).to_be_visible()

    # -- what can be found

    @property
    def message(self) -> Locator:
        """Where one types."""
        return self.page.get_by_role("textbox", name="Message", exact=True)

    @property
    def articles(self) -> Locator:
        """What was said, by both sides, on the current branch."""
        return self.page.get_by_role("region", name="Messages").get_by_role("article")

    @property
    def answers(self) -> Locator:
        """What the model said."""
        return self.page.get_by_role("article", name=ANSWER)

    def button(self, name: str, within: Locator | None = None) -> Locator:
        """A button by its exact name."""
        return (within or self.page).get_by_role("button", name=name, exact=True)

    def texts(self) -> list[str]:
        """Every message as it is shown, white space aside."""
        return [
            flat(text) for text in self.articles.locator(".text:not(.thoughts)").all_inner_texts()
        ]

    def answer(self) -> str:
        """The last answer as it is shown, white space aside."""
        return flat(self.text.inner_text())

    @property
    def text(self) -> Locator:
        """The text of the last answer."""
        return self.answers.last.locator(".text:not(.thoughts)")

    @property
    def connection(self) -> Locator:
        """What the page says of its connection."""
        return self.page.locator("#badge")

    @property
    def hash(self) -> str:
        """Where this conversation is found again, in this browser."""
        return "/#" + self.page.url.partition("#")[2]

    @property
    def session_id(self) -> str:
        """The session that the tab has spoken with last."""
        return str(self.witness.frames("session.opened")[-1]["session_id"])

    # -- what can be done

    def send(self, text: str) -> None:
        """Type a message and send it; what runs meanwhile is not interrupted."""
        self.message.fill(text)
        self.page.get_by_role("button", name=SEND).click()

    def say(self, text: str) -> str:
        """Send a message, wait for the whole answer and return it."""
        with self.answering():
            self.send(text)
        return self.answer()

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Wait for the end of the turn that the block begins."""
        count = len(self._ends())
        yield
        self.until(lambda: len(self._ends()) > count)
        self.rest()

    def press(self, name: str, article: Locator) -> None:
        """Press a button of a message, which shows them when pointed at."""
        article.hover()
        self.button(name, article).click()

    def edit(self, article: Locator, text: str) -> None:
        """Give a message another text."""
        article.hover()
        article.get_by_role("button", name=re.compile("^Edit this")).click()
        article.get_by_role("textbox").fill(text)
        article.get_by_role("button", name=re.compile("^(Send|Save and go on)$")).click()

    def settings(self, texts: dict[str, str], *, fold: str | None = None) -> None:
        """Fill in fields of the settings by their labels, those of a fold too, and save."""
        self.button("Settings").click()
        dialog = self.page.get_by_role("dialog", name="Settings")
        if fold is not None:
            dialog.get_by_text(fold, exact=True).click()
        for label, text in texts.items():
            dialog.get_by_label(label, exact=True).fill(text)
        self.button("Save", dialog).click()
        expect(dialog).to_have_count(0)

    def rest(self) -> None:
        """Wait until nothing runs, and what has run is drawn."""
        expect(self.button("Stop")).to_have_count(0, timeout=PATIENCE_MS)
        self.page.evaluate("() => new Promise((drawn) => requestAnimationFrame(drawn))")

    def hear(self, kind: str) -> dict[str, Any]:
        """Wait for a frame of this type, if none has come, and return the last."""
        self.until(lambda: bool(self.witness.frames(kind)))
        return self.witness.frames(kind)[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the browser is about to tell."""
        end = time.monotonic() + PATIENCE_MS / 1000
        while not condition():
            assert time.monotonic() < end, self.witness.heard[-3:]
            self.page.wait_for_timeout(10)  # lets frames in

    def end(self) -> dict[str, Any]:
        """The frame that ended the last turn."""
        return self._ends()[-1]

    def _ends(self) -> list[dict[str, Any]]:
        return [frame for frame in self.witness.heard if frame.get("type") in ENDS]


def flat(text: str) -> str:
    """A text with single spaces."""
    return " ".join(text.split())


def items_of(http: httpx.Client, session_id: str) -> list[str]:
    """What the server says was said, white space aside."""
    answer = http.get(f"/v1/sessions/{session_id}/items")
    answer.raise_for_status()
    return [flat(item["content"]) for item in answer.json()["data"]]


def said(question: str) -> str:
    """What the parrot answers."""
    return question.removeprefix("Say ")
