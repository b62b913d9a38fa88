"""`python -m tests.clients PACKAGES` runs other people's clients against a server, unmodified.

PACKAGES is a folder with what `make clients` has installed: a folder for each client, for they want
other versions than the server does. Those of `CALLING` get a model that calls what it is given. The
examples for Node and for browsers run here too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from session_server.local_server import LocalServer
from tests.web.test_tools import CALL, say, talking

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
ANSWERING = {
    "openai-agents": "agents/agents_client.py",
    "openai-node": "node/node_chat.mjs",
    "chromium": "chromium/page_client.mjs",
}
CALLING = {
    "langchain-openai": "langchain/langchain_client.py",
    "litellm": "litellm/litellm_client.py",
}
DEADLINE_S = 300


async def main() -> int:
    """Run all; return 1 if one has failed, or has not said what it was to say."""
    packages = Path(sys.argv[1]).resolve()
    failed = 0
    with LocalServer(["--threads", "1", "--log-level", "warning"]) as server:
        for name, script in ANSWERING.items():
            failed |= await run(name, packages / script, server.url, "Your name is Ada.")
    for name, script in CALLING.items():
        async with talking("hermes") as (this, _):
            say(this, *(CALL, "It rains.") * 2)
            failed |= await run(name, packages / script, this.url, "It rains.")
    return failed


async def run(name: str, script: Path, url: str, expected: str) -> int:
    """Run a client with its packages; return 1 unless it leaves well and has said so."""
    folder = script.parent
    for source in (*HERE.glob("*client*"), *EXAMPLES.glob("*.mjs"), *EXAMPLES.glob("*.html")):
        shutil.copy(source, folder)
    process = await asyncio.create_subprocess_exec(
        *("node" if script.suffix == ".mjs" else sys.executable, str(script), url),
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    said = output.decode()
    is_well = process.returncode == 0 and expected in said
    print(f"{name}: {'passed' if is_well else 'FAILED'}\n{said}", flush=True)
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
