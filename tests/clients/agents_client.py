"""`openai-agents` over both transports of Responses: two turns, and a third that is streamed."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI


async def main(url: str) -> None:
    """Ask what only the server remembers."""
    import agents
    from agents.models import openai_responses

    agents.set_tracing_disabled(True)
    kinds: tuple[Any, ...] = (
        openai_responses.OpenAIResponsesModel,
        openai_responses.OpenAIResponsesWSModel,
    )
    for kind in kinds:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        model = kind(model="session-server-embedded", openai_client=client)
        agent = agents.Agent(name="one", instructions="Be brief.", model=model)
        first = await agents.Runner.run(agent, "My name is Ada.")
        options = {"previous_response_id": first.last_response_id}
        second = await agents.Runner.run(agent, "What is my name?", **options)
        options = {"previous_response_id": second.last_response_id}
        streamed = agents.Runner.run_streamed(agent, "What is my name?", **options)
        async for _ in streamed.stream_events():
            pass
        assert "Ada" in second.final_output
        assert "Ada" in streamed.final_output
        print(kind.__name__, second.final_output)
        if hasattr(model, "close"):
            await model.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
