"""Accessibility as axe-core judges it."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

RUN = """axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations
  .filter((each) => ['serious', 'critical'].includes(each.impact)))"""


def serious(page: Page, source: str) -> list[str]:
    """What axe-core calls serious or critical on this page as it is now, an element a line."""
    tools = page.context.new_cdp_session(page)  # not subject to the page's policy, as a script is
    tools.send("Runtime.evaluate", {"expression": source})
    answer: dict[str, Any] = tools.send(
        "Runtime.evaluate", {"expression": RUN, "awaitPromise": True, "returnByValue": True}
    )
    tools.detach()
    assert "exceptionDetails" not in answer, answer
    return [
        f"{rule['impact']} {rule['id']}: {node['html']} ({node['failureSummary']})"
        for rule in answer["result"]["value"]
        for node in rule["nodes"]
    ]
