"""The agent loop as a user runs it, against a model that says what the test wants."""

from __future__ import annotations

import asyncio
import re
import sys

from tests.examples.test_examples import EXAMPLES
from tests.web.serving import DEADLINE_S
from tests.web.test_tools import CALL, say, talking

WRONG = '<tool_call>\n{"name": "add", "arguments": {"summands": [1, 2]}}\n</tool_call>'


def test_an_agent_calls_until_it_answers_and_computes_the_results_alone() -> None:
    async def check() -> None:
        async with asyncio.timeout(DEADLINE_S), talking("hermes") as (this, _):
            say(this, f"Let me look.\n{CALL}{WRONG}", CALL, "It rains.")
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(EXAMPLES / "openai_agent_loop.py"),
                "--url",
                this.url,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            out, err = await process.communicate()
            assert process.returncode == 0, err.decode()
            shown = out.decode()
            assert shown.count('weather({"city": "Oslo"}) = rain, 8 degrees') == 2
            assert "error: TypeError" in shown
            assert shown.rstrip().endswith("It rains.")
            counts = re.findall(r"(\d+) of (\d+) tokens were cached", shown)
            first, second, third = [tuple(map(int, pair)) for pair in counts]
            assert first[0] == 0
            assert first[1] < second[0] < second[1] <= third[0] + 1
            assert this.sessions.stats().sessions == 1

    asyncio.run(check())
