"""Text is text, whoever wrote it: an answer, a file, a key that is wrong."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from session_server.local_server import LocalServer
from tests.browser.chat import RICH, Chat, flat
from tests.browser.conftest import OpenTab
from tests.browser.test_transfer import DROP

HOSTILE = {
    "script": "<script>hit('script')</script>",
    "handler": "<img src=x onerror=\"hit('handler')\">",
    "svg": "<svg onload=\"hit('svg')\"><animate onbegin=\"hit('svg')\"></svg>",
    "frame": "<iframe srcdoc=\"<script>parent.hit('frame')</script>\"></iframe>",
    "link": "[press](javascript:hit('link')) [data](data:text/html,<script>hit()</script>)",
    "case": "[press](JaVaScRiPt:hit('case')) <JAVASCRIPT:hit()> [tab](java\tscript:hit())",
    "reference": "[press][r]\n\n[r]: javascript:hit('reference)",
    "image": "![seen](http://127.0.0.1:9/seen.png) ![x](//127.0.0.1:9/x.png)",
    "autolink": "<http://127.0.0.1:9/auto> http://127.0.0.1:9/bare www.example.invalid",
    "style": "<style>@import 'http://127.0.0.1:9/style.css';</style><link rel=stylesheet href=//x>",
    "form": "<form action=http://127.0.0.1:9/form><input name=q autofocus></form>",
    "refresh": '<meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/gone">',
    "base": '<base href="http://127.0.0.1:9/">',
    "fence": "```\"onmouseover=hit('fence')\n<script>hit('fence')</script>\n```",
    "table": "| a | b |\n|---|---|\n| <img src=x onerror=hit()> | <b onclick=hit()>b</b> |",
    "entity": "&lt;script&gt;hit()&lt;/script&gt; &#60;img src=x onerror=hit()&#62;",
    "comment": "<!--><script>hit('comment')</script>-->",
    "template": "<template><script>hit()</script></template> ${hit()} {{hit()}}",
    "clobber": '<form id="composer"><input id="message" name="getElementById"></form>',
}
HIT = "() => { window.hits = []; window.hit = (what) => window.hits.push(what ?? 'it'); }"


def nothing_happened(chat: Chat) -> None:
    """No script ran, nothing of the text became an element that could do something."""
    assert chat.page.evaluate("window.hits") == []
    region = chat.page.get_by_role("region", name="Messages")
    assert (
        region.locator("script, iframe, object, embed, form, style, link, img, base").count() == 0
    )
    handlers = (
        "(root) => [...root.querySelectorAll('*')].flatMap((node) => node.getAttributeNames())"
    )
    names = set(region.evaluate(handlers))
    assert not {name for name in names if name.startswith("on") or name in {"src", "srcdoc"}}
    for link in region.locator(".text a").all():
        target = link.get_attribute("href") or ""
        assert target.startswith(("http://", "https://", "mailto:")), target
        assert {"noopener", "noreferrer"} <= set((link.get_attribute("rel") or "").split())
        assert link.get_attribute("target") == "_blank"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_answer_is_text(open_tab: OpenTab, parrot: LocalServer, kind: str) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.page.evaluate(HIT)
    chat.say(f"Say {HOSTILE[kind]}")
    for link in chat.page.locator(".text a").all():
        link.hover()
    nothing_happened(chat)


def test_a_hostile_file_is_text(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url))
    chat.page.evaluate(HIT)
    markup = " ".join(HOSTILE.values())
    call = {"id": markup[:200], "name": HOSTILE["handler"], "arguments": markup}
    items = [
        {"role": role, "content": markup, "reasoning": markup, "tool_calls": [call]}
        for role in ("system", "user", "tool", "assistant")
    ]
    file = {
        "format": "session-server.conversations",
        "version": 1,
        "conversations": [{"title": HOSTILE["svg"] + "\u202e", "items": items}],
    }
    polluting = json.dumps(file)[:-1] + ', "__proto__": {"hit": 1}, "constructor": {"hit": 1}}'
    chat.page.evaluate(DROP, [polluting])
    expect(chat.articles).to_have_count(4)
    for fold in chat.page.locator("details.folded").all():
        fold.evaluate("(each) => (each.open = true)")
    expect(chat.page.locator("form.results textarea")).to_be_visible()
    chat.page.locator("form.results").evaluate("(form) => form.remove()")
    nothing_happened(chat)
    assert chat.page.evaluate("({}).hit") is None
    row = chat.page.locator(".chat.current")
    expect(row).to_have_text(HOSTILE["svg"])
    row.get_by_role("button", name=re.compile("^Rename")).click()
    expect(row.get_by_role("textbox")).to_be_focused()  # its module is loaded when it is needed
    chat.page.keyboard.press("Escape")
    row.get_by_role("button", name=re.compile("^Delete")).click()
    expect(chat.page.get_by_text(f"Delete “{HOSTILE['svg']}” from this browser")).to_be_visible()
    assert chat.page.locator("#sidebar svg[onload], #notices svg[onload]").count() == 0


def test_an_answer_is_what_its_markdown_says(open_tab: OpenTab, parrot: LocalServer) -> None:
    chat = Chat(open_tab(url=parrot.url, permissions=["clipboard-read", "clipboard-write"]))
    chat.say(f"Say {RICH}")
    text = chat.text
    for role, name in (("heading", "A head"), ("link", "a link"), ("table", None)):
        expect(text.get_by_role(role, name=name)).to_be_visible()  # type: ignore[arg-type]
    assert text.get_by_role("listitem").all_inner_texts() == ["one", "two"]
    assert text.locator("strong").inner_text() == "weight"
    assert flat(text.locator("blockquote").inner_text()) == "quoted"
    text.get_by_role("button", name=re.compile("^Copy")).click()
    pasted = chat.page.evaluate("navigator.clipboard.readText()")
    assert pasted.rstrip("\n") == 'for n in range(2):\n    print("n", n)'
    chat.press("Copy the text", chat.answers.last)
    chat.page.get_by_text("Copied.").wait_for()
    assert chat.page.evaluate("navigator.clipboard.readText()") == RICH
