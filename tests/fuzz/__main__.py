"""`python -m tests.fuzz`: frames that are wrong into every protocol, and to a server's sockets."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from session_server.sessions.manager import SessionManager
from session_server.sessions.salts import TenantSalts
from tests.fuzz.protocols import protocols
from tests.fuzz.wire import Shots, WireFuzz
from tests.sessions.paper_engine import PaperEngine
from tests.web.serving import WORD, model_text, serving_over


def main() -> int:
    """Fuzz; print what was sent and what went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="into each protocol")
    parser.add_argument("--wire", type=int, default=50_000, help="requests and frames to a server")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for name, shoot in protocols(args.seed).items():
        began_s = time.monotonic()
        for _ in range(args.frames):
            shoot()
        print(f"{name}: {args.frames:,} frames in {time.monotonic() - began_s:.0f} s", flush=True)
    shots = asyncio.run(fuzz_wire(args.wire, args.seed))
    print(f"over the wire: {dict(sorted(shots.answers.items()))}")
    print("\n".join(problem[:600] for problem in shots.problems[:40]))
    return 1 if shots.problems else 0


async def fuzz_wire(num_shots: int, seed: int) -> Shots:
    """Fuzz a server of this process, whose contexts are short."""
    engine = PaperEngine(
        vocab_size=1536, eos_ids=(4,), next_token=lambda context: WORD, max_turn_len=128
    )
    manager = SessionManager(engine, model_text(), salts=TenantSalts(bytes(32)))
    async with serving_over(engine, manager) as this:
        return await WireFuzz(this.url, seed).run(num_shots)


if __name__ == "__main__":
    sys.exit(main())
