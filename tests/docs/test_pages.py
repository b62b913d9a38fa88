"""What the pages say is what the code does, as far as a machine can tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from session_server.cli import COMMANDS
from session_server.client.session import RETRYABLE_CLOSE_CODES
from tests.docs.tables import DOCS, TABLES, with_table

ROOT = DOCS.parent
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH_IN_CODE = re.compile(r"`((?:cache|session_server|tests|examples|docs)/[\w./-]+)`")
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


def test_the_close_codes_that_invite_back_are_those_the_client_retries() -> None:
    text = (DOCS / "protocol.md").read_text("utf-8")
    table = text[text.index("### Close codes") : text.index("### Credentials")]
    invited = {int(code) for code in re.findall(r"^\| (\d{4}) \|.*\| yes", table, re.MULTILINE)}
    assert invited <= RETRYABLE_CLOSE_CODES
