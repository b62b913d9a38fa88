"""Let a model call functions until it answers, with the `openai` package: each call sends the whole
conversation and computes the results alone.

pip install openai; session-server serve --model-path MODEL; python examples/openai_agent_loop.py

MODEL is one whose chat template takes tools.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

try:
    import openai
    from openai.types.chat import ChatCompletionMessageParam
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: pip install -U openai")

MAX_STEPS = 10


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return {"Oslo": "rain, 8 degrees"}.get(city, "sun, 20 degrees")


def add(numbers: list[float]) -> str:
    """Add numbers."""
    return str(sum(numbers))


FUNCTIONS: dict[str, tuple[Callable[..., str], dict[str, Any]]] = {
    "weather": (weather, {"city": {"type": "string"}}),
    "add": (add, {"numbers": {"type": "array", "items": {"type": "number"}}}),
}


def main() -> None:
    """Answer one question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", nargs="?", default="What is the weather in Oslo?")
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--api-key", default="none", help="if the server asks for one")
    args = parser.parse_args()
    if "://" not in args.url:
        parser.error("give the address as http://HOST:PORT")
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key)
    try:
        run(client, args.question)
    except openai.AuthenticationError as error:
        sys.exit(f"{error.message}: pass --api-key")
    except openai.BadRequestError as error:
        sys.exit(error.message)
    except openai.APIConnectionError as error:
        why = error.__cause__ or error
        sys.exit(f"no answer from {args.url} ({why}): is a server running? `session-server serve`")


def run(client: openai.OpenAI, question: str) -> None:
    """Go on until an answer calls nothing. The list of messages is all the state there is here."""
    model = next(iter(client.models.list())).id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    for _ in range(MAX_STEPS):
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools())
        usage = answer.usage
        assert usage is not None, "this server always counts"
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"  {cached} of {usage.prompt_tokens} tokens were cached")
        message = answer.choices[0].message
        messages.append(message.to_dict())  # type: ignore[arg-type]  # the SDK takes what it gave
        if message.content:
            print(message.content)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            assert call.type == "function", "no other tools were given"
            result = result_of(call.function.name, call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    print(f"no answer after {MAX_STEPS} steps")


def tools() -> list[Any]:
    """Describe the functions."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": function.__doc__,
                "parameters": {
                    "type": "object",
                    "properties": properties,
                    "required": list(properties),
                },
            },
        }
        for name, (function, properties) in FUNCTIONS.items()
    ]


def result_of(name: str, arguments: str) -> str:
    """Call a function; what goes wrong is told to the model."""
    try:
        function, _ = FUNCTIONS[name]
        return function(**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__} {error}"


if __name__ == "__main__":
    main()
