"""What scrolling costs, from Chromium's own trace: the work of the main thread in each frame."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from playwright.sync_api import Page

BUDGET_MS: Final = 1000 / 60
CATEGORIES: Final = ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline.frame"]

SCROLL = """async ([selector, pixels]) => {
  const pane = document.querySelector(selector);
  const stamps = [];
  await new Promise((done) => {
    const step = (now) => {
      stamps.push(now);
      const before = pane.scrollTop;
      pane.scrollTop -= pixels;
      if (pane.scrollTop === before) done();
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  });
  return stamps;
}"""


@dataclass(frozen=True)
class Frames:
    """CPU time of the main thread between two frames, and the wall time between those asked for."""

    work_ms: list[float]
    gaps_ms: list[float]

    def __str__(self) -> str:
        apart = f"; {at(self.gaps_ms, 0.95):.1f} ms apart (p95)" if self.gaps_ms else ""
        return (
            f"{len(self.work_ms)} frames, main thread p50 {at(self.work_ms, 0.5):.1f} ms, "
            f"p95 {at(self.work_ms, 0.95):.1f} ms, worst {max(self.work_ms):.1f} ms{apart}"
        )


def at(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


@contextlib.contextmanager
def traced(page: Page) -> Iterator[list[float]]:
    """Measure a block; afterwards the list has the work of each of its frames in milliseconds."""
    tools = page.context.new_cdp_session(page)
    events: list[dict[str, Any]] = []
    ends: list[bool] = []
    work: list[float] = []
    tools.on("Tracing.dataCollected", lambda data: events.extend(data["value"]))
    tools.on("Tracing.tracingComplete", lambda _: ends.append(True))
    config = {"includedCategories": CATEGORIES}
    tools.send("Tracing.start", {"traceConfig": config, "transferMode": "ReportEvents"})
    yield work
    tools.send("Tracing.end")
    while not ends:
        page.wait_for_timeout(10)  # lets the events in
    tools.detach()
    work += _work(events)


def scroll_up(page: Page, selector: str, *, pixels: int) -> Frames:
    """Scroll an element from where it is to its top, so many pixels a frame."""
    with traced(page) as work:
        stamps = page.evaluate(SCROLL, [selector, pixels])
    return Frames(work, [after - before for before, after in itertools.pairwise(stamps)])


def _work(events: list[dict[str, Any]]) -> list[float]:
    """The CPU milliseconds of the page's main thread between each two frames."""
    main = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    own = [each for each in events if (each["pid"], each["tid"]) in main]
    borders = sorted(each["ts"] for each in own if each["name"] == "BeginMainThreadFrame")
    work = [0.0] * len(borders)
    for each in own:
        if each["name"].endswith("RunTask") and "dur" in each and each["ts"] >= borders[0]:
            # A frame begins inside its task, so the task belongs to the frame that it begins.
            frame = bisect.bisect_right(borders, each["ts"] + each["dur"]) - 1
            work[frame] += each.get("tdur", each["dur"]) / 1000
    return work
