"""Check whether this machine can serve, and say how to fix what is wrong.

With --store it examines a store instead, with a server running or without, and
changes nothing there. The exit status is 1 if a finding would keep the server
from serving, or if sessions, responses or conversations of the store are
damaged or lost.

examples:
  session-server doctor
  session-server doctor --model-path PATH            check your own checkpoint
  session-server doctor --device cuda                whether a GPU is used
  session-server doctor --port 8000 --json | jq .ok
  session-server doctor --store                 read all of the store of `serve`
  session-server doctor --store DIR             read all of another one
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import importlib.metadata
import json
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markup import escape

from session_server.arguments import whole_number
from session_server.config import HttpOptions, ModelOptions, Settings
from session_server.demo import MODEL_DIR
from session_server.models.errors import ModelError
from session_server.models.gguf.config import ARCHITECTURES
from session_server.models.registry import FAMILIES
from session_server.progress import StepProgress
from session_server.protocol.resources import IndexBody
from session_server.served_model import checked_directory, open_model
from session_server.sessions.store.disk_health import explain
from session_server.sessions.store.examination import examine
from session_server.sessions.store.lock import StoreUnusable
from session_server.store_place import add_config, find_store, made_store
from session_server.terminal import printable

_PORT: Final = HttpOptions().port

MIN_FREE_BYTES: Final = 1 << 30
"""Bytes that torch, a small model and its KV need together."""

ANSWER_S: Final = 2.0
"""Seconds to wait for what uses the port to say what it is."""

DRIVERS_GPUS: Final = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver lists its GPUs, whether or not torch sees them."""

MAX_ANSWER_BYTES: Final = 1 << 16
"""Bytes that are read of that."""

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
    """Rate how a finding affects serving."""

    GOOD = "good"
    WARNING = "warning"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """Describe the result of one check. `advice` says how to fix it; empty if nothing is wrong."""

    topic: str
    verdict: CheckStatus
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `doctor`."""
    serving = parser.add_argument_group("serving", "Check what `serve` would use.")
    serving.add_argument(
        "--model-path",
        metavar="PATH",
        help="checkpoint directory or GGUF file (default: the embedded model)",
    )
    serving.add_argument(
        "--device",
        type=device,
        default=ModelOptions().device,
        help=f"{ModelOptions.model_fields['device'].description} (default: %(default)s)",
    )
    serving.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: %(default)s)"
    )
    serving.add_argument(
        "--port",
        type=whole_number(0, 65_535),
        metavar="N",
        help=f"port to listen on (default: {_PORT})",
    )
    store = parser.add_argument_group("store", "Examine a store, and nothing else.")
    store.add_argument(
        "--store",
        nargs="?",
        const="",
        metavar="DIR",
        help="directory of the store; without DIR that of `serve` with the same configuration",
    )
    add_config(store)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="print one JSON object instead of lines"
    )


def device(text: str) -> str:
    """Return the name of a device that `serve` takes. Raises ValueError."""
    return ModelOptions(device=text).device


def run(args: argparse.Namespace) -> int:
    """Run every check. Return 1 if a finding would keep the server from serving."""
    if args.store is not None:
        findings = list(check_store(args.store, args.config, port=args.port))
    else:
        model_dir = Path(args.model_path) if args.model_path else MODEL_DIR
        port = _PORT if args.port is None else args.port
        findings = list(run_checks(model_dir, args.host, port, device_name=args.device))
    is_wrong = any(finding.verdict is CheckStatus.WRONG for finding in findings)
    console = Console()
    if args.json:
        console.print_json(json.dumps({"ok": not is_wrong, "findings": [*map(asdict, findings)]}))
        return int(is_wrong)
    width = max(len(of.topic) for of in findings)
    for of in findings:
        _print(console, of, width)
    return int(is_wrong)


def _print(console: Console, of: Finding, width: int) -> None:
    """Print a finding, and below it what to do. No line is broken: ids and commands are copied."""
    style = {CheckStatus.GOOD: "green", CheckStatus.WARNING: "yellow", CheckStatus.WRONG: "red"}
    verdict = f"[{style[of.verdict]}]{of.verdict:<7}[/]"
    for head, text in ((f"{of.topic:<{width}}  {verdict}", of.found), ("  to do:", of.advice)):
        if text:
            line = f"{head}  {escape(printable(text))}"
            console.print(line, highlight=False, soft_wrap=True)


def run_checks(
    model_dir: Path, host: str, port: int, *, device_name: str = "auto"
) -> Iterator[Finding]:
    """Yield every finding, cheap checks first. Never raises: a failed check is a finding."""
    yield check_python()
    yield from check_versions(importlib.metadata.version)
    of_device = check_device(device_name)
    yield of_device
    yield from check_gpu()
    yield check_kernels()
    is_usable = of_device.verdict is not CheckStatus.WRONG
    yield from check_model(model_dir, device_name if is_usable else "auto")
    yield check_port(host, port)
    yield check_disk(shutil.disk_usage(model_dir if model_dir.is_dir() else Path.cwd()).free)


def check_store(asked: str, config: Path | None, *, port: int | None = None) -> Iterator[Finding]:
    """Examine a store, that of a server where `asked` is empty, and show on stderr how far that
    is."""
    try:
        directory = made_store(find_store(asked or None, config, port=port))
    except (StoreUnusable, ValueError, OSError) as error:
        yield Finding("store", CheckStatus.WRONG, explain(error, Path()))
        return
    with StepProgress(Console(stderr=True)) as progress:
        task = progress.add_task("sessions and records", total=None)
        for of in examine(directory, partial(progress.advance, task)):
            verdict = CheckStatus.WARNING if of.advice else CheckStatus.GOOD
            verdict = CheckStatus.WRONG if of.is_wrong else verdict
            yield Finding(of.topic, verdict, of.found, of.advice)


def check_python() -> Finding:
    """Report the interpreter; an older one than the package supports fails at import."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", CheckStatus.GOOD, found)


def check_versions(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Check installed packages; `version_of` raises PackageNotFoundError if one is absent."""
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


def check_device(name: str = "auto") -> Finding:
    """Check the device that would run forwards, and its free memory for weights and KV."""
    try:
        from session_server.runner.capacity import free_bytes
        from session_server.runner.loader import choose_device
    except ImportError as error:
        return Finding("device", CheckStatus.WRONG, f"cannot load torch: {error}", "install torch")
    try:
        chosen = choose_device(name)
    except ValueError as error:
        return Finding("device", CheckStatus.WRONG, str(error))
    return check_memory(str(chosen), free_bytes(chosen))


def check_gpu() -> Iterator[Finding]:
    """Check whether torch sees a GPU, and whether the kernels for one can be compiled. A machine
    that has none is well too."""
    try:
        from session_server.attention import devices
    except ImportError:
        return  # of torch, which is told already
    gpus = devices.described_gpus()
    if gpus:
        yield Finding("gpu", CheckStatus.GOOD, gpus)
    elif DRIVERS_GPUS.is_dir():
        found = f"the driver lists GPUs, but {devices.no_cuda()}"
        yield Finding("gpu", CheckStatus.WARNING, found)
    else:
        yield Finding("gpu", CheckStatus.GOOD, f"no GPU: {devices.no_cuda()}")
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        found = "kernels for GPUs need it: pip install 'session-server[gpu]'"
        yield Finding("triton", CheckStatus.WARNING if gpus else CheckStatus.GOOD, found)
    else:
        yield Finding("triton", CheckStatus.GOOD, f"{version}, for kernels on GPUs")


def check_kernels() -> Finding:
    """Check whether the kernels for CPUs were built, and for which instructions they run."""
    from session_server.runner import native

    if native.is_available():
        try:
            found = f"{native.cpu_name()}, for forwards on a CPU"
        except ValueError as error:
            return Finding(
                "kernels", CheckStatus.WRONG, str(error), "unset it, or name one of them"
            )
        return Finding("kernels", CheckStatus.GOOD, found)
    advice = "install g++ 12 or clang 15 and then this package again; torch computes until then"
    return Finding("kernels", CheckStatus.WARNING, str(native.WHY_MISSING), advice)


def check_memory(device: str, num_bytes: int) -> Finding:
    """Check the free memory of a device, in bytes."""
    found = f"{device}, {num_bytes / (1 << 30):.1f} GiB free"
    if num_bytes < MIN_FREE_BYTES:
        advice = "free memory, or serve with --max-total-tokens and a small --context-length"
        return Finding("device", CheckStatus.WARNING, found, advice)
    return Finding("device", CheckStatus.GOOD, found)


def check_model(directory: Path, device_name: str = "auto") -> Iterator[Finding]:
    """Check a checkpoint with the code that `serve` starts with; read no weights."""
    if not directory.exists():
        advice = "pass the directory of a Hugging Face checkpoint, or a GGUF file, as --model-path"
        yield Finding("model", CheckStatus.WRONG, f"no such file or directory: {directory}", advice)
        return
    settings = Settings(model=ModelOptions(path=str(directory), device=device_name))
    try:
        checked_directory(settings)
    except (ModelError, ValueError) as error:
        advice = (
            f"use a safetensors checkpoint of one of: {', '.join(FAMILIES)}; or a GGUF file of one "
            f"of: {', '.join(ARCHITECTURES)}"
        )
        yield Finding("model", CheckStatus.WRONG, str(error), advice)
        return
    yield _check_weights(settings)
    try:
        yield asyncio.run(_check_tokenizer(settings))
    except ModelError as error:
        advice = "download tokenizer.json and the files next to it again"
        yield Finding("tokenizer", CheckStatus.WRONG, str(error), advice)


def _check_weights(settings: Settings) -> Finding:
    """Compare the tensors in the files with those that the model needs, and plan its memory."""
    try:
        from session_server.engine_wiring import plan_service

        plan = plan_service(settings)
    except ImportError as error:
        return Finding("model", CheckStatus.WRONG, f"cannot load torch: {error}", "install torch")
    except ModelError as error:
        advice = "download the weights again, as safetensors or GGUF; no other format is read"
        return Finding("model", CheckStatus.WRONG, str(error), advice)
    except ValueError as error:
        advice = "free memory, or serve with --mem-fraction-static or a small --context-length"
        return Finding("model", CheckStatus.WRONG, str(error), advice)
    config = plan.found.config
    found = (
        f"{config.model_type}, {plan.found.stored_bytes / 1e6:.1f} MB, context {plan.max_turn_len}"
    )
    if plan.found.device != "cpu":
        found += ", beside activations, which are measured at start"
    if plan.max_turn_len < config.max_position_embeddings:
        advice = "free memory, or serve with a larger --mem-fraction-static"
        found += f" of {config.max_position_embeddings}: KV memory is too small for more"
        return Finding("model", CheckStatus.WARNING, found, advice)
    return Finding("model", CheckStatus.GOOD, found)


async def _check_tokenizer(settings: Settings) -> Finding:
    _, text = await open_model(settings)
    await text.close()
    if text.chat is None:
        advice = "clients can only send raw text and token ids; messages need a chat template"
        return Finding("tokenizer", CheckStatus.WARNING, "no chat template", advice)
    if text.chat_error is not None:
        advice = "clients can only send raw text and token ids; download the chat template again"
        return Finding("tokenizer", CheckStatus.WARNING, text.chat_error, advice)
    return Finding("tokenizer", CheckStatus.GOOD, "with a chat template")


def check_port(host: str, port: int) -> Finding:
    """Check that the address can be bound now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            advice = "pass --host with an address of this machine"
            found = f"{host}:{port}: {error.strerror}"
            if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                advice = "stop the program that uses the port, or pass another --port (0: any free)"
            if error.errno == errno.EADDRINUSE and _is_session_server(host, port):
                found = f"{host}:{port}: a session-server answers there"
                advice = "use that one, or stop it, or pass another --port (0: any free)"
            return Finding("port", CheckStatus.WRONG, found, advice)
    return Finding("port", CheckStatus.GOOD, f"{host}:{port} is free")


def _is_session_server(host: str, port: int) -> bool:
    """Return whether a server like ours answers, without TLS."""
    with contextlib.closing(HTTPConnection(host, port, timeout=ANSWER_S)) as connection:
        try:
            connection.request("GET", "/")
            answer = connection.getresponse().read(MAX_ANSWER_BYTES)
        except (OSError, HTTPException):
            return False
    return f'"name":"{IndexBody().name}"'.encode() in answer


def check_disk(free_bytes: int) -> Finding:
    """Check the free disk space for checkpoints, in bytes."""
    found = f"{free_bytes / (1 << 30):.1f} GiB free"
    if free_bytes < MIN_FREE_BYTES:
        return Finding(
            "disk", CheckStatus.WARNING, found, "free disk space before downloading a model"
        )
    return Finding("disk", CheckStatus.GOOD, found)
