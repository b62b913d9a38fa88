"""Answer requests with `transformers`' continuous batching, one JSON object per line.

Started as `python -m session_server.bench.peers.generating_worker CHECKPOINT DTYPE THREADS`. It
prints `ready`, reads `{"name", "prompt", "num_output"}` and prints `{"name", "num_tokens",
"error"}`.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any


def main(checkpoint: str, dtype: str, num_threads: str) -> None:
    """Answer until the input ends."""
    import torch
    import transformers

    torch.set_num_threads(int(num_threads))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype)
    )
    greedy = {"do_sample": False, "eos_token_id": -1}
    config = transformers.GenerationConfig.from_dict(greedy)
    manager = model.eval().init_continuous_batching(generation_config=config)
    manager.start()
    threading.Thread(target=_print_answers, args=(manager,), daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        manager.add_request(
            request["prompt"], request_id=request["name"], max_new_tokens=request["num_output"]
        )
    manager.stop(block=True)


def _print_answers(manager: Any) -> None:
    while True:
        output = manager.get_result(timeout=1.0)
        if output is not None:
            answer = {"name": output.request_id, "error": output.error}
            answer["num_tokens"] = len(output.generated_tokens)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
