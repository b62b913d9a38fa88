"""Hold a conversation with the `openai` package: every call sends all of it, and computes what is
new.

pip install openai; session-server serve; python examples/openai_chat.py
"""

from __future__ import annotations

import argparse
import sys

try:
    import openai
    from openai.types.chat import ChatCompletionMessageParam
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not there: pip install -U openai")

QUESTIONS = ("My name is Ada.", "What is my name?", "My city is Oslo.", "What is my city?")


def main() -> None:
    """Ask every question, and show how many tokens of each context were there already."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--api-key", default="none", help="if the server asks for one")
    args = parser.parse_args()
    if "://" not in args.url:
        parser.error("give the address as http://HOST:PORT")
    client = openai.OpenAI(base_url=f"{args.url}/v1", api_key=args.api_key)
    try:
        converse(client)
    except openai.AuthenticationError as error:
        sys.exit(f"{error.message}: pass --api-key")
    except openai.APIConnectionError as error:
        why = error.__cause__ or error
        sys.exit(f"no answer from {args.url} ({why}): is a server running? `session-server serve`")


def converse(client: openai.OpenAI) -> None:
    """Ask one question after the other. The list of messages is all the state there is here."""
    model = next(iter(client.models.list())).id
    messages: list[ChatCompletionMessageParam] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
        content = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": content})
        usage = answer.usage
        assert usage is not None, "this server always counts"
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"> {question}\n{content}\n  {cached} of {usage.prompt_tokens} tokens were cached\n")


if __name__ == "__main__":
    main()
