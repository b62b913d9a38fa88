"""Chromium, a server process, and tabs that are watched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from session_server.local_server import LocalServer
from tests.browser.chromium import axe_source, launch
from tests.browser.witness import Witness
from tests.rig.recovery import well_kept

FLAGS = ["--threads", "1", "--log-level", "warning", "--memory-check", "warn"]
PARROT = (sys.executable, "-m", "tests.browser.parrot")
DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
LOOKS: dict[str, dict[str, Any]] = {
    f"{size}-{scheme}": {"color_scheme": scheme} | options
    for scheme in ("light", "dark")
    for size, options in {
        "desktop": {"viewport": DESKTOP},
        "phone": {"viewport": PHONE, "is_mobile": True, "has_touch": True},
    }.items()
}
PATIENCE_MS = 30_000


@dataclass(frozen=True)
class Tab:
    """A page, the context it lives in (its cookies and stores), and who watches it."""

    page: Page
    context: BrowserContext
    witness: Witness


OpenTab = Callable[..., Tab]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests; each has contexts of its own."""
    with sync_playwright() as playwright:
        running = launch(playwright)
        yield running
        running.close()


@pytest.fixture(scope="session")
def server() -> Iterator[LocalServer]:
    """The embedded model in a process of its own, and proof at the end that it kept its books."""
    with well_kept(FLAGS) as running:
        yield running


@pytest.fixture
def http(server: LocalServer) -> Iterator[httpx.Client]:
    """What a test asks the server behind the page's back."""
    with httpx.Client(base_url=server.url, trust_env=False, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="session")
def parrot() -> Iterator[LocalServer]:
    """A server whose model says what it is asked to say, and takes its time."""
    with LocalServer(program=PARROT) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def parrot_http(parrot: LocalServer) -> Iterator[httpx.Client]:
    """What a test asks that server behind the page's back."""
    with httpx.Client(base_url=parrot.url, trust_env=False, timeout=60.0) as client:
        yield client


@pytest.fixture
def open_tab(browser: Browser, server: LocalServer) -> Iterator[OpenTab]:
    """Open tabs; at the end none of them may have had trouble.

    `path`: where; `url`: of another server; `beside`: a tab whose stores the new one shares; other
    options are those of a context. Motion is reduced unless a test says otherwise, so that nothing
    is caught half way.
    """
    tabs: list[Tab] = []
    contexts: list[BrowserContext] = []

    def opening(
        path: str = "/", *, url: str = server.url, beside: Tab | None = None, **options: Any
    ) -> Tab:
        settings = {"viewport": DESKTOP, "reduced_motion": "reduce"} | options
        context = beside.context if beside else browser.new_context(**settings)
        if beside is None:
            contexts.append(context)
            context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        tab = Tab(page, context, Witness(page, url))
        tabs.append(tab)
        page.goto(url + path)
        return tab

    yield opening
    for context in contexts:
        context.close()
    troubles = [trouble for tab in tabs for trouble in tab.witness.troubles]
    assert not troubles, "\n".join(troubles)


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return axe_source()
