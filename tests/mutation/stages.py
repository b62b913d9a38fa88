"""Which files are mutated, and which tests may kill a mutant, in which order."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Final

NOT_SERVING: Final = {"session_server/bench", "session_server/demo", "session_server/inspector"}
NEVER: Final = (
    "tests/mutants/",
    "tests/mutation/",
    "tests/scenarios/test_catalogue.py",
    "tests/examples/",
    "tests/wire/test_wheel.py",
    "tests/test_contracts.py",
    "tests/test_shape.py",
    "tests/test_tooling.py",
)
"""Tests that look at the text of the code, which every mutant changes, or build environments."""

LONGEST: Final = ("tests/sim/test_million.py", "tests/oracle/test_detours.py")
"""Tests that come after all others."""

NEIGHBORS: Final = {
    "cache": "engine sim scenarios runner differential oracle",
    "session_server": "web wire engine_host chaos",
    "session_server/attention": "models runner oracle",
    "session_server/client": "web wire chaos",
    "session_server/core": "engine sessions protocol sim runner web faults",
    "session_server/deploy": "web wire",
    "session_server/engine": "sim scenarios faults differential engine_host oracle",
    "session_server/engine_host": "engine faults web chaos wire",
    "session_server/metrics": "web engine_host wire",
    "session_server/models": "runner attention oracle wire",
    "session_server/parallel": "oracle runner wire",
    "session_server/protocol": "web sim faults client wire",
    "session_server/runner": "models oracle differential engine_host wire",
    "session_server/sessions": "sim faults scenarios web wire chaos",
    "session_server/text": "sessions web faults wire",
    "session_server/web": "faults wire client chaos",
}
"""Directories of tests that may notice what the mirrored one does not, the cheap ones first."""


def package_of(path: Path) -> str:
    """Return the package of a file: `cache`, `session_server` or `session_server/engine`."""
    is_top = path.parts[0] == "cache" or len(path.parts) == 2
    return path.parts[0] if is_top else "/".join(path.parts[:2])


def serving_files(root: Path) -> dict[str, list[Path]]:
    """Return the files of each serving package, relative to `root`."""
    files: dict[str, list[Path]] = defaultdict(list)
    for top in ("cache", "session_server"):
        for path in sorted((root / top).rglob("*.py")):
            relative = path.relative_to(root)
            if package_of(relative) not in NOT_SERVING:
                files[package_of(relative)].append(relative)
    return dict(files)


def stages(root: Path, path: Path) -> list[list[str]]:
    """Return test files in groups, to be run one after the other until a test fails.

    First come mirrored tests that import the mutated file, then the others of that directory, those
    that know bounds, others that import the file, neighboring directories, and the longest. No file
    is in two groups.
    """
    package, module = package_of(path), ".".join(path.with_suffix("").parts)
    mirrored = f"tests/{package.split('/')[-1]}/" if package != "session_server" else "tests/test_"
    imports = _imports(root)
    direct = [test for test, names in imports.items() if module.removesuffix(".__init__") in names]
    groups = [
        [test for test in direct if test.startswith(mirrored) or test.endswith(f"_{path.name}")],
        [test for test in imports if test.startswith(mirrored)],
        [test for test in imports if test.startswith("tests/docs/")],
        direct,
        *(
            [test for test in imports if test.startswith(f"tests/{neighbor}/")]
            for neighbor in NEIGHBORS[package].split()
        ),
    ]
    last = [test for group in groups for test in group if test in LONGEST]
    seen: set[str] = set(LONGEST)
    unique = []
    for group in groups:
        unique.append([test for test in group if test not in seen])
        seen.update(group)
    return [group for group in [*unique, sorted(set(last))] if group]


@cache
def _imports(root: Path) -> dict[str, set[str]]:
    """Return, of each test file, the modules it imports by name."""
    found = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(NEVER):
            found[name] = _modules(path.read_text("utf-8"))
    return found


def _modules(source: str) -> set[str]:
    """Return the names of imported modules; `from a import b` names both `a` and `a.b`."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
