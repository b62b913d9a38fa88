"""`litellm` with a tool: answers and calls, whole and streamed, from threads and from tasks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def main(url: str) -> None:
    """Ask twice, answer what is called, and count what each step computes anew."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices on the Internet
    import litellm

    litellm.suppress_debug_info = True
    options: dict[str, Any] = {
        "model": "openai/paper",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "tools": [WEATHER],
    }
    streamed = options | {"stream": True, "stream_options": {"include_usage": True}}

    def whole(talk: list[Any]) -> Any:
        return litellm.completion(messages=talk, **options)

    def pieces(talk: list[Any]) -> Any:
        return litellm.stream_chunk_builder(list(litellm.completion(messages=talk, **streamed)))

    async def awaited(talk: list[Any]) -> Any:
        return await litellm.acompletion(messages=talk, **options)

    async def awaited_pieces(talk: list[Any]) -> Any:
        stream = await litellm.acompletion(messages=talk, **streamed)
        return litellm.stream_chunk_builder([chunk async for chunk in stream])

    talk: list[Any] = []
    total = 0
    for ask, answer in ((whole, awaited_pieces), (pieces, awaited)):
        talk.append({"role": "user", "content": "What is the weather in Oslo?"})
        for step in (ask, answer):
            said = step(talk)
            if asyncio.iscoroutine(said):
                said = await said
            cached = said.usage.prompt_tokens_details.cached_tokens or 0
            assert cached >= total - 1, (cached, total)
            total = said.usage.total_tokens
            message = said.choices[0].message
            talk.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                assert json.loads(call.function.arguments) == {"city": "Oslo"}
                talk.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
            print(step.__name__, message.content, message.tool_calls, cached, "cached")
        assert talk[-2]["role"] == "tool", "what is called stands before the answer"


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
