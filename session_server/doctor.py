"""Show what this machine offers a server, what is wrong, and what to do.

The exit status is 1 when something would keep the server from serving.

examples:
  session-server doctor
  session-server doctor --model-path DIR             with a checkpoint of yours
  session-server doctor --port 8000 --json | jq .ok
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from session_server.arguments import whole_number
from session_server.config import ModelOptions, Settings
from session_server.models.errors import ModelError
from session_server.models.registry import FAMILIES
from session_server.served_model import checked_directory, open_model

MIN_FREE_BYTES: Final = 1 << 30
"""Below this, torch, a small model and its KV do not fit side by side."""

REQUIRED: Final = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "jinja2",
    "msgspec",
    "fastapi",
    "uvicorn",
    "websockets",
)


class CheckStatus(StrEnum):
    """How a finding bears on serving."""

    GOOD = "good"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `advice` says what to do and is empty when nothing is."""

    topic: str
    verdict: CheckStatus
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`."""
    serving = parser.add_argument_group("serving", "What `serve` would be asked for.")
    serving.add_argument(
        "--model-path", metavar="DIR", help="a checkpoint (default: the embedded model)"
    )
    serving.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    serving.add_argument(
        "--port",
        type=whole_number(0, 65_535),
        metavar="N",
        default=30000,
        help="(default: %(default)s)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object, not a table")


def run(args: argparse.Namespace) -> int:
    """Look at everything. Returns 1 when something would keep the server from serving."""
    model_dir = Path(args.model_path) if args.model_path else embedded_model_dir()
    findings = list(run_checks(model_dir, args.host, args.port))
    is_wrong = any(finding.verdict is CheckStatus.WRONG for finding in findings)
    console = Console()
    if args.json:
        console.print_json(json.dumps({"ok": not is_wrong, "findings": [*map(asdict, findings)]}))
        return int(is_wrong)
    styles = {CheckStatus.GOOD: "green", CheckStatus.WARNING: "yellow", CheckStatus.WRONG: "red"}
    table = Table("", "", "found", "what to do")
    for finding in findings:
        style = styles[finding.verdict]
        verdict = f"[{style}]{finding.verdict}[/]"
        table.add_row(finding.topic, verdict, escape(finding.found), finding.advice)
    console.print(table)
    return int(is_wrong)


def run_checks(model_dir: Path, host: str, port: int) -> Iterator[Finding]:
    """Every finding, cheap ones first. Never raises: what cannot be found out is a finding."""
    yield check_python(sys.version_info[:2])
    yield from check_versions(importlib.metadata.version)
    yield check_device()
    yield from check_model(model_dir)
    yield check_port(host, port)
    yield check_disk(shutil.disk_usage(model_dir if model_dir.is_dir() else Path.cwd()).free)


def embedded_model_dir() -> Path:
    """Where the model that ships with the package lies."""
    return Path(__file__).parent / "demo" / "model"


def check_python(version: tuple[int, int]) -> Finding:
    """The interpreter."""
    found = f"{version[0]}.{version[1]} on {platform.system()} {platform.machine()}"
    if version < (3, 11):
        return Finding("python", CheckStatus.WRONG, found, "use Python 3.11 or newer")
    return Finding("python", CheckStatus.GOOD, found)


def check_versions(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Installed packages; `version_of` raises `PackageNotFoundError` for an absent one."""
    versions, missing = [], []
    for name in REQUIRED:
        try:
            versions.append(f"{name} {version_of(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if versions:
        yield Finding("packages", CheckStatus.GOOD, ", ".join(versions))
    if missing:
        advice = "install the package again: pip install session-server"
        yield Finding("packages", CheckStatus.WRONG, "missing: " + ", ".join(missing), advice)


def check_device() -> Finding:
    """Where a forward would run, and what memory is left there for weights and KV."""
    try:
        from session_server.runner.capacity import free_bytes
        from session_server.runner.loader import choose_device
    except ImportError as error:
        return Finding("device", CheckStatus.WRONG, f"cannot load torch: {error}", "install torch")
    device = choose_device("auto")
    return check_memory(str(device), free_bytes(device))


def check_memory(device: str, num_bytes: int) -> Finding:
    """Memory of the device that would be chosen."""
    found = f"{device}, {num_bytes / (1 << 30):.1f} GiB free"
    if num_bytes < MIN_FREE_BYTES:
        advice = "free some, or serve with --max-total-tokens and a small --context-length"
        return Finding("device", CheckStatus.WARNING, found, advice)
    return Finding("device", CheckStatus.GOOD, found)


def check_model(directory: Path) -> Iterator[Finding]:
    """Check a checkpoint with the code that `serve` starts with; no weights are read."""
    if not directory.is_dir():
        advice = "give the directory of a Hugging Face checkpoint with --model-path"
        yield Finding("model", CheckStatus.WRONG, f"no directory {directory}", advice)
        return
    settings = Settings(model=ModelOptions(path=str(directory)))
    try:
        checked_directory(settings)
    except (ModelError, ValueError) as error:
        advice = f"give a checkpoint in safetensors of: {', '.join(FAMILIES)}"
        yield Finding("model", CheckStatus.WRONG, str(error), advice)
        return
    yield _check_weights(settings)
    try:
        yield asyncio.run(_check_tokenizer(settings))
    except ModelError as error:
        advice = "fetch tokenizer.json and the files beside it again"
        yield Finding("tokenizer", CheckStatus.WRONG, str(error), advice)


def _check_weights(settings: Settings) -> Finding:
    """Compare the tensors there are with those that the model must have, and plan its memory."""
    try:
        from session_server.engine_wiring import plan_service

        plan = plan_service(settings)
    except ImportError as error:
        return Finding("model", CheckStatus.WRONG, f"cannot load torch: {error}", "install torch")
    except ModelError as error:
        advice = "fetch the weights again, as safetensors; other formats are not read"
        return Finding("model", CheckStatus.WRONG, str(error), advice)
    except ValueError as error:
        advice = "free memory, or serve with --mem-fraction-static or a small --context-length"
        return Finding("model", CheckStatus.WRONG, str(error), advice)
    config = plan.found.config
    found = (
        f"{config.model_type}, {plan.found.stored_bytes / 1e6:.1f} MB, context {plan.max_turn_len}"
    )
    if plan.max_turn_len < config.max_position_embeddings:
        advice = "free memory, or serve with a larger --mem-fraction-static"
        found += f" of {config.max_position_embeddings}: KV memory holds no more"
        return Finding("model", CheckStatus.WARNING, found, advice)
    return Finding("model", CheckStatus.GOOD, found)


async def _check_tokenizer(settings: Settings) -> Finding:
    _, text = await open_model(settings)
    await text.close()
    if text.chat is None:
        advice = "only raw text and token ids can be sent; messages need a chat template"
        return Finding("tokenizer", CheckStatus.WARNING, "no chat template", advice)
    if text.chat_error is not None:
        advice = "only raw text and token ids can be sent; fetch the chat template again"
        return Finding("tokenizer", CheckStatus.WARNING, text.chat_error, advice)
    return Finding("tokenizer", CheckStatus.GOOD, "with a chat template")


def check_port(host: str, port: int) -> Finding:
    """Whether the address can be bound now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "stop what listens there, or serve with another --port (0: any free one)"
            return Finding("port", CheckStatus.WRONG, f"{host}:{port}: {error.strerror}", advice)
    return Finding("port", CheckStatus.GOOD, f"{host}:{port} is free")


def check_disk(free_bytes: int) -> Finding:
    """Room for checkpoints."""
    found = f"{free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding("disk", CheckStatus.WARNING, found, "free some before fetching a model")
    return Finding("disk", CheckStatus.GOOD, found)
