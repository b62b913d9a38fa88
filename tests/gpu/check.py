"""`make gpu-check`: prove and measure on a GPU what was proven without one, part by part.

Each part is a process of its own with a time limit, and works alone: `--parts kernels,decode`. The
most important ones come first: graphs, decode and prefill, in seven minutes at most. What a part
prints is in `OUT/PART.txt` as it is printed; `OUT/summary.json` and `OUT/page.md` are written anew
behind every part, so a run that is cut short has told what it knew. The page is made for
docs/benchmarks.md.

Needs torch with its triton, transformers and what `make gpu-bundle` has put beside the sources, or
what `make install` installs; no network, and nothing of the web. What is missing is said first.
Without a GPU the same parts run with a tiny model, the kernels in Triton's interpreter and graphs
on a recording fake: that shows that this program works, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.gpu import plots

ROOT: Final = Path(__file__).resolve().parents[2]
WHEELS: Final = ROOT / "wheels"
NEEDED: Final = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors")
BUNDLED: Final = ("msgspec", "llguidance", "gguf", "pydantic", "pytest", "psutil", "hypothesis")
OPTIONAL: Final = ("matplotlib", "pytest-timeout")

_PYTEST: Final = ("pytest", "-q", "-x", "-p", "no:cacheprovider")
_BENCH: Final = ("tests.bench.gpu", "--attention-backend")


@dataclass(frozen=True)
class Part:
    """What one process shows: the arguments of `python -m`, and how long it may take."""

    name: str
    what: str
    argv: tuple[str, ...]
    limit_s: int
    is_bench: bool = False


PARTS: Final = (
    Part(
        "graphs",
        "decode steps replayed from CUDA graphs against the same without",
        (*_PYTEST, "tests/gpu/test_decode_graphs.py"),
        120,
    ),
    Part(
        "decode",
        "decode by Triton in graphs, against the byte floor",
        (*_BENCH, "triton", "--parts", "decode,profile"),
        180,
        is_bench=True,
    ),
    Part(
        "prefill",
        "prefill by Triton, against the floor of bytes and operations",
        (*_BENCH, "triton", "--parts", "prefill"),
        90,
        is_bench=True,
    ),
    Part(
        "eager",
        "decode by Triton, kernel by kernel",
        (*_BENCH, "triton", "--parts", "decode", "--cuda-graph-max-bs", "0"),
        120,
        is_bench=True,
    ),
    Part(
        "torch",
        "decode and prefill by torch's attention",
        (*_BENCH, "torch", "--parts", "decode,prefill"),
        180,
        is_bench=True,
    ),
    Part(
        "kernels",
        "attention by Triton against the reference, in bf16 and fp16, and experts",
        (*_PYTEST, "tests/attention/test_triton.py", "tests/runner/test_triton_experts.py"),
        300,
    ),
    Part(
        "layers",
        "what is between products, quantized linears and recurrent layers, against torch",
        (
            *_PYTEST,
            "tests/runner/test_triton_fused.py",
            "tests/runner/test_triton_linear.py",
            "tests/runner/test_triton_integer_linear.py",
            "tests/attention/test_triton_recurrent.py",
        ),
        240,
    ),
    Part(
        "sessions",
        "conversations under pressure, all checks on, overlapped and not, with graphs and without",
        (*_PYTEST, "tests/differential/test_tiny_models.py"),
        300,
    ),
    Part(
        "transformers",
        "`generate` of transformers with the same shape",
        (*_BENCH, "torch", "--parts", "transformers"),
        120,
        is_bench=True,
    ),
    Part(
        "logits",
        "every family by Triton against transformers, in fp32",
        (*_PYTEST, "tests/oracle/test_triton.py"),
        300,
    ),
    Part(
        "copies",
        "pages that are copied out of the pools and back",
        (*_PYTEST, "tests/cache/test_page_copy.py", "tests/oracle/test_restored.py"),
        300,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a part ended. `status`: of its process; None if its time was over. `is_bench`: it only
    measures."""

    name: str
    what: str
    command: str
    status: int | None
    seconds: float
    is_bench: bool


def run(part: Part, out: Path, *, is_tiny: bool) -> Outcome:
    """Run a part, with what it prints in its file."""
    argv = [sys.executable, "-m", *part.argv]
    if part.is_bench:
        argv += ["--json", str(out / f"{part.name}.json")]
        argv += ["--shape", "tiny"] if is_tiny else []
    places = filter(None, (str(out / "site"), os.environ.get("PYTHONPATH")))
    environment = {
        "TEST_DEVICE": "cpu" if is_tiny else "cuda",
        "PYTHONPATH": os.pathsep.join(places),
    }
    if is_tiny:
        environment["TRITON_INTERPRET"] = "1"
    began = time.monotonic()
    with (out / f"{part.name}.txt").open("wb") as file:
        process = subprocess.Popen(
            argv,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(part.limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    command = " ".join(("python -m", *argv[2:]))
    seconds = round(time.monotonic() - began, 1)
    return Outcome(part.name, part.what, command, status, seconds, part.is_bench)


def missing(names: Sequence[str]) -> list[str]:
    """Return those of some packages that this Python cannot import."""
    return [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]


def whats_missing() -> str | None:
    """Return what keeps every part from running, in a line; None if nothing does."""
    lacking = missing(NEEDED if WHEELS.is_dir() else (*NEEDED, *BUNDLED))
    if not lacking:
        return None
    return (
        f"gpu-check: {sys.executable} has no {', '.join(lacking)}; run `make install TORCH=torch`, "
        "or name a Python that has them: make gpu-check PYTHON=..."
    )


def what_comes(parts: Sequence[Part]) -> str:
    """Return how long parts take at most, and which come in which order."""
    names = ", ".join(f"{part.name} ({part.limit_s} s)" for part in parts)
    return f"at most {sum(part.limit_s for part in parts) / 60:.0f} min, in this order: {names}"


def install_bundled(out: Path) -> None:
    """Install what is not there from the wheels beside the sources, for these processes alone."""
    if missing((*BUNDLED, *OPTIONAL)) and WHEELS.is_dir():
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps")
        wheels = map(str, sorted(WHEELS.glob("*.whl")))
        subprocess.run((*pip, "--target", str(out / "site"), *wheels), check=True)


def page(device: str, outcomes: Sequence[Outcome], out: Path) -> str:
    """Return the page: what held, and the tables that benchmarks printed."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in NEEDED[:2])
    lines = [f"# {device}, {today}", "", f"{versions}, `make gpu-check`.", ""]
    lines += ["| part | | seconds | |", "|---|---|---|---|"]
    for each in outcomes:
        lines.append(f"| {each.name} | {each.what} | {each.seconds:g} | {_told(each)} |")
    for each in outcomes:
        if each.is_bench:
            text = (out / f"{each.name}.txt").read_text("utf-8", "replace").strip()
            lines += ["", f"## {each.name}: {each.what}", "", f"`{each.command}`", "", text]
    with contextlib.suppress(ImportError):
        lines += ["", *(f"![{path.stem}]({path.name})" for path in plots.draw(out))]
    return "\n".join(lines) + "\n"


def _told(outcome: Outcome) -> str:
    if outcome.status is None:
        return "its time was over"
    if outcome.status:
        return f"**status {outcome.status}**"
    return "measured" if outcome.is_bench else "holds"


def main() -> int:
    """Run the parts. Return 1 if one of them failed or its time was over, 2 if a package is
    missing."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-check")
    parser.add_argument("--parts", default=",".join(names), help=f"of {', '.join(names)}")
    args = parser.parse_args()
    asked = args.parts.split(",")
    if unknown := set(asked) - set(names):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if (told := whats_missing()) is not None:
        print(told, file=sys.stderr)
        return 2
    import torch

    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    is_tiny = not torch.cuda.is_available()
    device = "no GPU: a tiny model and fakes" if is_tiny else torch.cuda.get_device_name()
    parts = [part for part in PARTS if part.name in asked]
    print(f"{device}; results in {out}\n{what_comes(parts)}", flush=True)
    install_bundled(out)
    outcomes: list[Outcome] = []
    for part in parts:
        print(f"{part.name}: {part.what} ...", flush=True)
        outcomes.append(run(part, out, is_tiny=is_tiny))
        print(f"{part.name}: {_told(outcomes[-1])}, {outcomes[-1].seconds:g} s", flush=True)
        summary = {"device": device, "torch": torch.__version__, "parts": [*map(asdict, outcomes)]}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", "utf-8")
        (out / "page.md").write_text(page(device, outcomes, out), "utf-8")
    return 1 if any(each.status != 0 for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
