"""`session-server doctor`: what this machine offers a server, what is wrong, and what to do."""

from __future__ import annotations

import argparse
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
from rich.table import Table

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
CHECKPOINT_FILES: Final = ("config.json", "tokenizer.json")


class Verdict(StrEnum):
    """How a finding bears on serving."""

    GOOD = "good"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `advice` says what to do and is empty when nothing is."""

    topic: str
    verdict: Verdict
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`."""
    parser.add_argument("--model-path", help="a checkpoint directory to look into")
    parser.add_argument("--host", default="127.0.0.1", help="(default: %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Look at everything. Returns 1 when something would keep the server from serving."""
    model_dir = Path(args.model_path) if args.model_path else embedded_model_dir()
    findings = list(examine(model_dir, args.host, args.port))
    is_wrong = any(finding.verdict is Verdict.WRONG for finding in findings)
    console = Console()
    if args.json:
        console.print_json(json.dumps({"ok": not is_wrong, "findings": [*map(asdict, findings)]}))
        return int(is_wrong)
    styles = {Verdict.GOOD: "green", Verdict.WARNING: "yellow", Verdict.WRONG: "red"}
    table = Table("", "", "found", "what to do")
    for finding in findings:
        style = styles[finding.verdict]
        verdict = f"[{style}]{finding.verdict}[/]"
        table.add_row(finding.topic, verdict, finding.found, finding.advice)
    console.print(table)
    return int(is_wrong)


def examine(model_dir: Path, host: str, port: int) -> Iterator[Finding]:
    """Every finding, cheap ones first. Never raises: what cannot be found out is a finding."""
    yield check_python(sys.version_info[:2])
    yield from check_versions(importlib.metadata.version)
    yield check_device()
    yield check_memory(free_memory_bytes())
    yield check_model(model_dir)
    yield check_port(host, port)
    yield check_disk(shutil.disk_usage(model_dir if model_dir.is_dir() else Path.cwd()).free)


def embedded_model_dir() -> Path:
    """Where the model that ships with the package lies."""
    return Path(__file__).parent / "demo" / "model"


def check_python(version: tuple[int, int]) -> Finding:
    """The interpreter."""
    found = f"{version[0]}.{version[1]} on {platform.system()} {platform.machine()}"
    if version < (3, 11):
        return Finding("python", Verdict.WRONG, found, "use Python 3.11 or newer")
    return Finding("python", Verdict.GOOD, found)


def check_versions(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Installed packages; `version_of` raises `PackageNotFoundError` for an absent one."""
    versions, missing = [], []
    for name in REQUIRED:
        try:
            versions.append(f"{name} {version_of(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if versions:
        yield Finding("packages", Verdict.GOOD, ", ".join(versions))
    if missing:
        advice = "install the package again: pip install session-server"
        yield Finding("packages", Verdict.WRONG, "missing: " + ", ".join(missing), advice)


def check_device() -> Finding:
    """Where a forward would run."""
    try:
        from session_server.runner.device import describe_device
    except ImportError as error:
        return Finding("device", Verdict.WRONG, f"cannot load torch: {error}", "install torch")
    return Finding("device", Verdict.GOOD, describe_device())


def check_memory(free_bytes: int | None) -> Finding:
    """Memory for weights and KV, on the host."""
    if free_bytes is None:
        return Finding("memory", Verdict.WARNING, "cannot tell how much is free")
    found = f"{free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        advice = "free some, or serve with --max-total-tokens and a small --context-length"
        return Finding("memory", Verdict.WARNING, found, advice)
    return Finding("memory", Verdict.GOOD, found)


def free_memory_bytes() -> int | None:
    """Memory the kernel would give out without swapping, where it says so (Linux)."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    available = values.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None


def check_model(directory: Path) -> Finding:
    """Whether the files of a checkpoint are there and can be parsed."""
    if not directory.is_dir():
        advice = "give the directory of a Hugging Face checkpoint with --model-path"
        return Finding("model", Verdict.WRONG, f"no directory {directory}", advice)
    missing = [name for name in CHECKPOINT_FILES if not (directory / name).is_file()]
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        missing.append("*.safetensors")
    if missing:
        advice = "only safetensors checkpoints with a tokenizer.json are served"
        return Finding("model", Verdict.WRONG, "missing: " + ", ".join(missing), advice)
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (ValueError, OSError) as error:
        return Finding("model", Verdict.WRONG, f"config.json: {error}", "fetch the file again")
    megabytes = sum(path.stat().st_size for path in weights) / 1e6
    return Finding("model", Verdict.GOOD, f"{config.get('model_type')}, {megabytes:.1f} MB")


def check_port(host: str, port: int) -> Finding:
    """Whether the address can be bound now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "stop what listens there, or serve with another --port (0: any free one)"
            return Finding("port", Verdict.WRONG, f"{host}:{port}: {error.strerror}", advice)
    return Finding("port", Verdict.GOOD, f"{host}:{port} is free")


def check_disk(free_bytes: int) -> Finding:
    """Room for checkpoints."""
    found = f"{free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding("disk", Verdict.WARNING, found, "free some before fetching a model")
    return Finding("disk", Verdict.GOOD, found)
