"""The pages: the right files under the right headers, small, and nothing in them that is markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from session_server.web import pages
from session_server.web.keys import KeyRing
from tests.web.serving import Served, served

ROOT = Path(__file__).resolve().parent.parent.parent
STATIC = ROOT / "session_server/web/static"
BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MAX_BYTES = 200_000
MAX_SENT_BYTES = 120_000
MEDIA = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
SCRIPTS = sorted(name for name in pages.FILES if name.endswith(".js"))
DOCUMENTS = sorted(name for name in pages.FILES if name.endswith(".html"))
MARKUP_SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTML|srcdoc|DOMParser"
    r"|createContextualFragment|\beval\(|new Function|setAttribute\(['\"](on|style)"
)
URL = re.compile(r"\b(?:https?|wss?):(?://|\\/\\/)[^\s'\"`)>]*")
IMPORT = re.compile(r"^(?:import|export)\b[^;]*?from '([^']+)'", re.MULTILINE)
NAMED_IMPORT = re.compile(r"^import \{([^}]*)\} from '([^']+)'", re.MULTILINE)
EXPORT = re.compile(r"^export (?:async )?(?:class|const|function\*?) (\w+)", re.MULTILINE)
SVG_NAMESPACE = "http://www.w3.org/2000/svg"


def text_of(name: str) -> str:
    return pages.FILES[name].plain.content.decode()


@served(keys=KeyRing.of("secret"))
async def test_every_file_is_sent_without_a_key_as_what_it_is(this: Served) -> None:
    assert len(pages.FILES) >= 7
    for name, file in pages.FILES.items():
        answer = await this.http.get(f"/static/{name}")
        assert answer.content == (STATIC / name).read_bytes() == file.plain.content
        assert answer.headers["content-type"] == MEDIA[name.rpartition(".")[2]]
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "unsafe" not in policy


@served()
async def test_a_file_that_has_not_changed_is_not_sent_again(this: Served) -> None:
    takes_gzip = {
        "gzip, br": True,
        "identity": False,
        "br;q=1, gzip;q=0": False,
        "GZip;q=0.5": True,
    }
    for coding, is_zipped in takes_gzip.items():
        sent = {"accept-encoding": coding}
        first = await this.http.get("/static/theme.css", headers=sent)
        tag = first.headers["etag"]
        assert first.headers.get("content-encoding") == ("gzip" if is_zipped else None)
        cases = ((tag, 304), (f'"x", W/{tag}', 304), ('"x"', 200), (tag.strip('"'), 200))
        for said, status in cases:
            headers = sent | {"if-none-match": said}
            answer = await this.http.get("/static/theme.css", headers=headers)
            assert (answer.status_code, answer.headers["etag"]) == (status, tag)
            assert answer.content == (first.content if status == 200 else b"")
            assert "accept-encoding" in answer.headers["vary"]
    tags = {body.etag for file in pages.FILES.values() for body in (file.plain, file.zipped)}
    assert len(tags) == 2 * len(pages.FILES)


@served()
async def test_a_browser_gets_the_page_and_a_program_the_index(this: Served) -> None:
    page = await this.http.get("/", headers=BROWSER)
    assert page.content == pages.FILES["index.html"].plain.content
    for accept in ("*/*", "application/json", ""):
        index = await this.http.get("/", headers={"accept": accept})
        assert index.json()["dashboard"] == "/dashboard"
        assert "accept" in index.headers["vary"]
        assert "accept" in page.headers["vary"]
    board = await this.http.get("/dashboard")
    assert board.content == pages.FILES["dashboard.html"].plain.content


@served()
async def test_what_is_not_in_the_table_is_no_file(this: Served) -> None:
    for name in (
        "../pages.py",
        "..%2fpages.py",
        "%2e%2e/pages.py",
        "....//pages.py",
        "/etc/passwd",
        "vendor",
        "theme.css/",
        "THEME.CSS",
        "theme.css%00",
        "vendor/LICENSE",
        "",
    ):
        answer = await this.http.get(f"/static/{name}")
        assert answer.status_code == 404, name
        assert answer.json()["error"]["code"] == "not_found"


def loaded_by(document: str) -> set[str]:
    """What a page loads before anybody touches it: what it names, and what that imports."""
    found, next_ones = set[str](), {document}
    while next_ones:
        found |= next_ones
        named = {other for name in next_ones for other in named_in(name)}
        next_ones = named - found
    return found


def named_in(name: str) -> set[str]:
    if name.endswith(".html"):
        return set(re.findall(r'(?:src|href)="/static/([^"]+)"', text_of(name)))
    return {(Path(name).parent / other).as_posix() for other in IMPORT.findall(text_of(name))}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_page_is_small(document: str) -> None:
    sizes = {name: len(pages.FILES[name].plain.content) for name in loaded_by(document)}
    assert sum(sizes.values()) <= MAX_BYTES, sizes


def test_all_files_together_are_sent_small() -> None:
    assert sum(len(file.zipped.content) for file in pages.FILES.values()) <= MAX_SENT_BYTES


def test_the_pages_name_no_other_place() -> None:
    """Links in a comment are still links: who reads the source finds the way by the docs."""
    for name in pages.FILES:
        if name.startswith("vendor/"):
            continue
        assert set(URL.findall(text_of(name))) <= {SVG_NAMESPACE}, name


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_makes_elements_from_text(name: str) -> None:
    assert not MARKUP_SINKS.search(text_of(name))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_nothing_inline_and_only_files_of_the_table(name: str) -> None:
    text = text_of(name)
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    named = re.findall(r'(?:src|href)="/static/([^"]+)"', text)
    assert named
    assert set(named) <= set(pages.FILES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_only_files_of_the_table(name: str) -> None:
    lazily = re.findall(r"\bimport\('\./([^']+)'\)", text_of(name))
    assert named_in(name) | set(lazily) <= set(pages.FILES)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_what_the_other_exports(name: str) -> None:
    """A name that is missing is found by the browser alone, and the page stays empty."""
    for names, other in NAMED_IMPORT.findall(text_of(name)):
        if not other.startswith("./vendor/"):
            wanted = {each.partition(" as ")[0].strip() for each in names.split(",")} - {""}
            assert wanted <= set(EXPORT.findall(text_of((Path(name).parent / other).as_posix())))
