"""`langchain-openai` with a tool bound: answers and calls, whole and streamed."""

from __future__ import annotations

import sys
from typing import Any


def main(url: str) -> None:
    """Ask twice, run what is called, and count what each step computes anew."""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return {"Oslo": "Rain."}[city]

    model = ChatOpenAI(model="paper", base_url=f"{url}/v1", api_key="none", stream_usage=True)
    bound = model.bind_tools([weather])

    def stream(talk: list[Any]) -> Any:
        first, *rest = bound.stream(talk)
        return sum(rest, start=first)

    talk: list[Any] = []
    total = 0
    for ask, answer in ((bound.invoke, stream), (stream, bound.invoke)):
        talk.append(HumanMessage("What is the weather in Oslo?"))
        for step in (ask, answer):
            said = step(talk)
            used = said.usage_metadata
            cached = used["input_token_details"].get("cache_read", 0)
            assert cached >= total - 1, (cached, total)
            total = used["total_tokens"]
            talk.append(said)
            talk += [weather.invoke(call) for call in said.tool_calls]
            print(step.__name__, said.text, said.tool_calls, cached, "cached")
        assert talk[-2].content == "Rain.", "what is called stands before the answer"


if __name__ == "__main__":
    main(sys.argv[1])
