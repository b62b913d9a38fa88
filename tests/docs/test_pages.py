"""What the pages say is what the code does, as far as a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from session_server.cli import COMMANDS
from session_server.client.refusals import RETRYABLE_CLOSE_CODES
from session_server.protocol.session_protocol import CloseCode
from session_server.web.app import ROUTERS
from tests.docs.tables import DOCS, TABLES, metric_table, with_table

ROOT = DOCS.parent
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH_IN_CODE = re.compile(r"`((?:cache|session_server|tests|examples|docs)/[\w./-]+)`")
# SGLang has two names for each of these; the page gives one.
SYNONYMS = {"/model_info", "/get_server_info"}
COMMAND = re.compile(r"session-server ([a-z]+)")


@pytest.mark.parametrize(("page", "name"), sorted(TABLES))
def test_a_generated_table_is_what_the_code_says(page: str, name: str) -> None:
    text = (DOCS / page).read_text("utf-8")
    written = with_table(text, name, TABLES[page, name]())
    assert text == written, "run: python -m tests.docs.tables"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_and_path_leads_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link]
    broken = [target for target in targets if target and not (page.parent / target).exists()]
    broken += [path for path in PATH_IN_CODE.findall(text) if not (ROOT / path).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_named_exists(page: Path) -> None:
    named = set(COMMAND.findall(page.read_text("utf-8")))
    assert named <= set(COMMANDS)


LOST_LINES = {1001, 1005, 1006}
"""What a client sees of a broken line or a proxy that leaves; the server sends none of them."""


def test_the_close_codes_that_invite_back_are_exactly_those_the_client_retries() -> None:
    text = (DOCS / "protocol.md").read_text("utf-8")
    table = text[text.index("### Close codes") : text.index("### Credentials")]
    invited = {int(code) for code in re.findall(r"^\| (\d{4}) \|.*\| yes", table, re.MULTILINE)}
    assert invited | LOST_LINES == RETRYABLE_CLOSE_CODES


def test_the_close_codes_listed_are_those_that_are_sent() -> None:
    text = (DOCS / "protocol.md").read_text("utf-8")
    table = text[text.index("### Close codes") : text.index("### Credentials")]
    rows = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    listed = {int(code) for row in rows for code in re.findall(r"\d{4}", row)}
    source = "".join(path.read_text("utf-8") for path in (ROOT / "session_server").rglob("*.py"))
    sent = {code for code in CloseCode if f"CloseCode.{code.name}" in source}
    assert sent == set(CloseCode)
    # A client's own close is answered by the WebSocket library.
    assert listed == {1000, *map(int, sent)}


def test_every_metric_named_is_scraped() -> None:
    text = (DOCS / "runbook.md").read_text("utf-8")
    named = set(re.findall(r"`(session_server_\w+)", text))
    assert named <= set(re.findall(r"`(session_server_\w+)", metric_table()))


def test_every_route_is_in_the_protocol_page() -> None:
    text = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    routes = {
        re.sub(r"\{[\w:]+\}", "{}", route.path)
        for router in ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
    }
    documented = re.sub(r"\{\w+\}", "{}", text)
    missing = {route for route in routes if route not in documented}
    assert missing <= SYNONYMS
