"""`python -m tests.browser.screenshots [FOLDER]` makes the pictures of the pages in the documents.

A conversation with the embedded model, whose beginning was written by hand so that there is
something to see; all figures are those of the turns that ran.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from session_server.local_server import LocalServer
from tests.browser.chat import Chat
from tests.browser.chromium import launch
from tests.browser.conftest import FLAGS, LOOKS, Tab
from tests.browser.witness import Witness

ASSETS: Final = Path(__file__).parents[2] / "docs" / "assets"
MAX_BYTES: Final = 120_000
NUM_COLORS: Final = 256
CURVES_MS: Final = 10_000
"""The curves of the dashboard need something to show."""

SMALL_POOL: Final = ("--max-total-tokens", "32768")
TITLES: Final = ("Names for a lighthouse", "Bread without kneading", "My city is Oslo.")
BEGINNING: Final = """A prefix cache guesses what will be asked again; a **session** knows.

| a turn of 32 new tokens behind | computed anew |
|---|---|
| 480 tokens | 32 |
| 4,000 tokens | 32 |

```json
{"type": "turn.create", "input": "My name is Ada."}
{"type": "session.fork", "at_item": "i_1"}
{"type": "session.rewind", "to_item": null}
```"""
KEEP: Final = """async (conversations) => {
  const {Conversations} = await import('/static/conversations.js');
  const {keep} = await import('/static/transfer.js');
  const list = new Conversations(localStorage);
  return conversations.map((each) => keep(list, each).id).at(-1);
}"""


def main(folder: Path) -> None:
    """Take every picture, and fail if one is too big for a document."""
    with LocalServer([*FLAGS, *SMALL_POOL]) as server, sync_playwright() as playwright:
        browser = launch(playwright)
        for look, options in LOOKS.items():
            sharp = {"device_scale_factor": 2} if options.get("is_mobile") else {}
            with opened(browser, server.url, options | sharp) as tab:
                chat = talk(tab)
                take(chat.page, folder / f"page-chat-{look}.png")
                chat.page.goto(f"{server.url}/dashboard")
                with busy(server.url):
                    chat.page.wait_for_timeout(CURVES_MS)
                    take(chat.page, folder / f"page-dashboard-{look}.png")
        browser.close()


@contextlib.contextmanager
def opened(browser: Browser, url: str, look: dict[str, Any]) -> Iterator[Tab]:
    """A tab that nothing may go wrong in."""
    context = browser.new_context(reduced_motion="reduce", **look)
    page = context.new_page()
    witness = Witness(page, url)
    page.goto(url)
    yield Tab(page, context, witness)
    assert not witness.troubles, witness.troubles
    context.close()


def talk(tab: Tab) -> Chat:
    """The conversation of the pictures."""
    chat = Chat(tab)
    others = [{"title": title, "items": [{"role": "user", "content": title}]} for title in TITLES]
    said = [
        {"role": "user", "content": "What does a session give that a prefix cache cannot?"},
        {"role": "assistant", "content": BEGINNING, "status": "completed"},
    ]
    shown = {"title": "Sessions and prefix caches", "items": said}
    record = chat.page.evaluate(KEEP, [*others, shown])
    chat.page.goto("about:blank")
    chat.page.goto(f"{chat.witness.origin}/#{record}")
    expect(chat.articles).to_have_count(len(said))
    chat.say("My name is Ada.")
    chat.say("What is my name?")
    chat.page.mouse.move(0, 0)
    chat.page.get_by_role("button", name="Away with this").click()
    return chat


@contextlib.contextmanager
def busy(url: str) -> Iterator[None]:
    """Sessions at rest and sessions that are answered, for the dashboard to show."""
    headers = {"accept": "text/event-stream"}
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as http:
        names = [http.post("/v1/sessions", json={}).json()["id"] for _ in range(10)]
        for number, name in enumerate(names):
            told = [f"My name is {who}." for who in ("Ada", "Eve", "Bob")[: 1 + number % 3]]
            for text in told:
                body = {"input": text, "sampling": {"temperature": 0}}
                http.post(f"/v1/sessions/{name}/turns", json=body).raise_for_status()
        with contextlib.ExitStack() as turns:
            for name in names[:4]:
                sampling = {"ignore_eos": True, "max_tokens": 3900}
                body = {"input": "Count from 1 to 1000.", "sampling": sampling}
                path = f"/v1/sessions/{name}/turns"
                turns.enter_context(http.stream("POST", path, json=body, headers=headers))
            yield
        for name in names:
            http.delete(f"/v1/sessions/{name}")


def take(page: Page, path: Path) -> None:
    """Write what is in sight as a small picture."""
    image = Image.open(io.BytesIO(page.screenshot()))
    image.convert("RGB").quantize(NUM_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {image.width} x {image.height}, {size:,} bytes")
    assert size <= MAX_BYTES, path


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ASSETS)
