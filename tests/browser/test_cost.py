"""What the page costs: bytes, requests before the first paint, work of a frame, nodes."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.chat import LONG, Chat, said
from tests.browser.conftest import OpenTab
from tests.browser.frames import BUDGET_MS, Frames, at, scroll_up, traced

NODES_OF_A_TURN = 80
ANSWER = """## Answer NUMBER

It goes on with **words** of [a link](https://example.org/) and `code`, for a line or two, as they
do when somebody explains something at length and does not want to come to an end.

* one
* two

| a | b |
|---|---|
| 1 | 2 |

```python
for number in range(10):
    print(number)
```
"""
USAGE = {"input_tokens": 640, "cached_tokens": 480, "output_tokens": 32, "total_tokens": 672}
KEEP = """async (conversation) => {
  const {Conversations} = await import('/static/conversations.js');
  const {keep} = await import('/static/transfer.js');
  return keep(new Conversations(localStorage), conversation).id;
}"""
MOVES = """async ([selector, pixels]) => {
  const pane = document.querySelector(selector);
  const {left, top, width} = pane.getBoundingClientRect();
  const [x, y] = [left + width / 2, top + 200];
  const frame = () => new Promise(requestAnimationFrame);
  const moves = [];
  for (let before = -1; before !== pane.scrollTop; ) {
    const seen = document.elementFromPoint(x, y).closest('article');
    const place = seen?.getBoundingClientRect().top;
    before = pane.scrollTop;
    pane.scrollTop -= pixels;
    await frame();
    if (seen) moves.push(seen.getBoundingClientRect().top - place);
  }
  return moves;
}"""
MAX_BYTES = 200_000
TURNS = 300
ENTRIES = """async () => [await new Promise((painted) =>
    new PerformanceObserver((list) => painted(list.getEntries().at(-1).startTime))
      .observe({type: 'paint', buffered: true})),
  [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
    .map(({name, startTime, initiatorType, decodedBodySize}) =>
      ({name, startTime, isFile: initiatorType !== 'fetch', size: decodedBodySize}))]"""


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_a_page_is_small_and_its_own(open_tab: OpenTab, server: LocalServer, path: str) -> None:
    page = open_tab(path).page
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    painted, entries = page.evaluate(ENTRIES)
    files = [each for each in entries if each["isFile"]]
    assert len(files) > 5
    assert sum(each["size"] for each in files) <= MAX_BYTES
    before = [each["name"] for each in entries if each["startTime"] < painted]
    allowed = (server.url + "/static/", server.url + path)
    assert all(name.startswith(allowed) for name in before), before


def turn(number: int) -> list[dict[str, Any]]:
    """A question and an answer with a bit of everything."""
    answer = ANSWER.replace("NUMBER", str(number))
    return [
        {"role": "user", "content": f"Question {number}: how does it go on?"},
        {"role": "assistant", "content": answer, "status": "completed", "usage": USAGE},
    ]


def long_chat(open_tab: OpenTab, url: str) -> Chat:
    """A tab with a conversation of `TURNS` turns, at its end."""
    chat = Chat(open_tab(url=url, reduced_motion="no-preference"))
    items = [item for number in range(TURNS) for item in turn(number)]
    record = chat.page.evaluate(KEEP, {"title": "Long", "items": items})
    chat.page.goto("about:blank")
    chat.page.goto(f"{url}/#{record}")
    expect(chat.articles).to_have_count(2 * TURNS)
    expect(chat.page.get_by_text(f"Answer {TURNS - 1}")).to_be_in_viewport()
    return chat


def test_what_is_laid_out_while_it_scrolls_moves_nothing_in_sight(
    open_tab: OpenTab, server: LocalServer
) -> None:
    page = long_chat(open_tab, server.url).page
    moves = page.evaluate(MOVES, ["#transcript", 400])
    assert len(moves) > 100
    *full, _to_top, at_top = moves
    assert at_top == 0
    assert all(abs(move - 400) <= 1 for move in full)


def test_three_hundred_turns_scroll_at_sixty_frames(
    open_tab: OpenTab, server: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = long_chat(open_tab, server.url)
    up = scroll_up(chat.page, "#transcript", pixels=400)
    expect(chat.page.get_by_text("Question 0:")).to_be_in_viewport()
    again = scroll_up_again(chat)
    with capsys.disabled():
        print(f"\n{TURNS} turns, first: {up}\n{TURNS} turns, again: {again}")
    for frames in (up, again):
        assert len(frames.work_ms) > 100
        assert at(frames.work_ms, 0.95) <= BUDGET_MS, str(frames)
    assert chat.page.evaluate("document.querySelectorAll('*').length") <= NODES_OF_A_TURN * TURNS


def scroll_up_again(chat: Chat) -> Frames:
    """Scroll all of it once more, now that every message was in sight."""
    chat.button("To the end").click()
    expect(chat.page.get_by_text(f"Answer {TURNS - 1}")).to_be_in_viewport()
    return scroll_up(chat.page, "#transcript", pixels=400)


def test_an_answer_streams_at_sixty_frames_behind_three_hundred_turns(
    open_tab: OpenTab, parrot: LocalServer, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = long_chat(open_tab, parrot.url)
    chat.send(LONG)
    chat.hear("turn.delta")
    # Nothing is looked for meanwhile: that would be the work of the page's main thread too.
    with traced(chat.page) as work:
        chat.hear("turn.completed")
    chat.rest()
    with capsys.disabled():
        print(f"\nan answer behind {TURNS} turns: {Frames(work, [])}")
    assert len(work) > 60
    assert at(work, 0.95) <= BUDGET_MS
    assert chat.answer() == said(LONG)
