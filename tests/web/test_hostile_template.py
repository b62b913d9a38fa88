"""A checkpoint whose chat template hangs: one turn fails, the server goes on."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from session_server.sessions.manager import SessionManager
from session_server.sessions.salts import TenantSalts
from session_server.text.model_text import load_model_text
from session_server.text.template_worker import RenderLimits, TemplateWorker
from tests.sessions.paper_engine import PaperEngine
from tests.text.tiny_models import CHATML, write_model
from tests.web.serving import WORD, serving_over, turn

HANGS = (
    "{% if messages[-1].content == 'hang' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)


def chat(content: str) -> dict[str, Any]:
    return turn(input=[{"role": "user", "content": content}])


def test_a_template_that_hangs_costs_its_turn_and_nobody_else_waits(tmp_path: Path) -> None:
    async def attack() -> None:
        folder = write_model(tmp_path, "chatml")
        (folder / "chat_template.jinja").write_text(HANGS + CHATML)
        start = partial(TemplateWorker.start, limits=RenderLimits(cpu_s=0.1))
        text = await load_model_text(folder, start_renderer=start)
        engine = PaperEngine(vocab_size=402, eos_ids=(4,), next_token=lambda context: WORD % 402)
        manager = SessionManager(engine, text, salts=TenantSalts(bytes(32)))
        async with serving_over(engine, manager) as this:
            first, second = await this.open(), await this.open()
            hanging = asyncio.create_task(
                this.http.post(f"/v1/sessions/{first}/turns", json=chat("hang"))
            )
            # Rendered in the server, it would hold up whatever follows for hours.
            assert (await this.http.get("/health")).status_code == 200
            other = await this.http.post(f"/v1/sessions/{second}/turns", json=chat("fine"))
            assert other.json()["status"] == "completed"
            refused = await hanging
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("tokenize_failed", "input")
            assert "processor time" in error["message"]
            again = await this.http.post(f"/v1/sessions/{first}/turns", json=chat("fine"))
            assert again.json()["status"] == "completed"
        await text.close()

    asyncio.run(attack())
