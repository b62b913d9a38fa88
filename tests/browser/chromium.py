"""Where Chromium and axe-core are, and what to do where they are not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Playwright

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
AXE: Final = "axe/node_modules/axe-core/axe.min.js"


def chromium_path() -> str:
    """The browser named by CHROMIUM, or the first on the path."""
    named = os.environ.get("CHROMIUM", "")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        missing = f"CHROMIUM={named} is no program" if named else "there is no Chromium here"
        raise SystemExit(
            f"{missing}: `apt-get install chromium` on Debian and Ubuntu, "
            "or name another with CHROMIUM=PATH"
        )
    return found


def axe_source() -> str:
    """axe-core, as `make browser` has installed it."""
    path = Path(os.environ.get("CLIENTS", ".venv/clients")) / AXE
    if not path.is_file():
        raise SystemExit(
            f"{path} is missing: `make browser` installs it, CLIENTS=PATH names another"
        )
    return path.read_text("utf-8")


def launch(playwright: Playwright) -> Browser:
    """A headless Chromium: the one that people have, not one that was built for tests."""
    # In a container there is no namespace for the sandbox and little shared memory.
    arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
    return playwright.chromium.launch(executable_path=chromium_path(), args=arguments)


if __name__ == "__main__":
    print(chromium_path())
