"""What the whole source tree promises, whatever the packages do inside."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from session_server.core import errors
from session_server.core.errors import WIRE_ERRORS, SessionServerError

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path for package in ("cache", "session_server") for path in (ROOT / package).rglob("*.py")
)

WITHOUT_WEB = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")
        return None

sys.meta_path.insert(0, Blocker())
import {modules}
"""

BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_ATTRIBUTES = {
    ("torch", "load"): "tensors are read from safetensors, never from pickle",
    ("torch", "save"): "tensors are written as safetensors, never as pickle",
    ("os", "environ"): "the environment is read where processes are begun and nowhere else",
    ("os", "getenv"): "the environment is read where processes are begun and nowhere else",
    ("os", "system"): "no shell",
    ("yaml", "load"): "no code from data",
}
BANNED_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
MAY_IMPORT = {"session_server/deploy/router.py": {"pickle"}}
"""Ray's proxy hands a request to its router as it has just pickled it, in the same process."""

MAY_READ_ENVIRONMENT = {
    "application.py",
    "arguments.py",
    "engine_wiring.py",
    "environment.py",
    "head.py",
    "local_server.py",
    "serve.py",
    "serving.py",
    "store_place.py",
    "wiring.py",
}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def test_the_import_law_holds() -> None:
    # In a process of its own: it switches off every logger there is.
    law = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    held = subprocess.run(
        [sys.executable, "-c", law], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert held.returncode == 0, held.stdout


def test_every_part_of_the_server_has_its_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    placed = " ".join(contracts["contracts"][0]["layers"])
    parts = {path.stem for path in (ROOT / "session_server").iterdir() if path.suffix == ".py"}
    parts |= {path.parent.name for path in (ROOT / "session_server").glob("*/__init__.py")}
    missing = {part for part in parts - {"__init__"} if f"session_server.{part}" not in placed}
    assert not missing


@pytest.mark.parametrize(
    ("modules", "blocked"),
    [
        ("cache, session_server.runner", ["fastapi", "starlette", "uvicorn", "pydantic"]),
        ("cache.session_cache, cache.checker", ["torch", "session_server"]),
        ("session_server.engine.engine", ["torch", "fastapi", "tokenizers", "jinja2"]),
        ("session_server.sessions.manager", ["torch", "fastapi", "starlette", "uvicorn"]),
        ("session_server.protocol.session_protocol", ["torch", "fastapi", "websockets"]),
        ("tests.sim.command", ["torch", "pytest", "hypothesis"]),
        ("session_server.deploy.command, session_server.deploy.routing", ["ray", "torch"]),
        ("session_server.client", ["torch", "fastapi", "starlette", "uvicorn", "pydantic"]),
    ],
)
def test_a_package_loads_without_what_it_must_not_need(modules: str, blocked: list[str]) -> None:
    code = WITHOUT_WEB.format(blocked=blocked, modules=modules)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_source_runs_code_from_data() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None)
                names = {alias.name for alias in node.names} | ({module} if module else set())
                banned = BANNED_IMPORTS - MAY_IMPORT.get(str(path), set())
                found += [(path, name) for name in names & banned]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found += [(path, node.func.id)] if node.func.id in BANNED_CALLS else []
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                found.append((path, node.arg))
    assert not found


def test_no_source_reaches_for_what_belongs_elsewhere() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                reason = BANNED_ATTRIBUTES.get((node.value.id, node.attr))
                allowed = node.value.id == "os" and path.name in MAY_READ_ENVIRONMENT
                if reason and not allowed:
                    found.append(f"{path}:{node.lineno}: {reason}")
    assert not found, "\n".join(found)


def test_no_error_is_swallowed() -> None:
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in {"Exception", "BaseException"}
            )
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            if broad and silent:
                found.append(f"{path}:{node.lineno}")
    assert not found, "\n".join(found)


def test_no_source_tests_types_by_hasattr() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hasattr"
    ]
    assert not found, "\n".join(found)


def test_no_module_keeps_mutable_state() -> None:
    """A container bound to a name at module level is a constant: annotated `Final` or immutable."""
    found = []
    for path, tree in trees():
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            mutable = isinstance(node.value, ast.List | ast.Dict | ast.Set)
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_dunder = all(isinstance(n, ast.Name) and n.id.startswith("__") for n in names)
            is_final = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
            if mutable and not is_dunder and not is_final:
                found.append(f"{path}:{node.lineno}")
    assert not found, "\n".join(found)


def test_every_error_has_one_wire_form_and_every_code_one_error() -> None:
    declared = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, SessionServerError)
    }
    assert declared - {SessionServerError} == set(WIRE_ERRORS)
    codes = [form.code for form in WIRE_ERRORS.values()]
    assert len(codes) == len(set(codes))


def test_nobody_outside_the_cache_reaches_through_its_facade() -> None:
    """The server uses verbs and views; the simulator, tests and the checker look inside through
    `SessionAwareCache.inspect`, of which nothing that serves is told."""
    found = []
    for root in ("session_server", "tests", "examples"):
        for path in (ROOT / root).rglob("*.py"):
            if path.relative_to(ROOT).parts[:2] == ("tests", "mutants"):
                continue  # they are pieces of the cache's own text
            text = path.read_text(encoding="utf-8")
            if "stores" not in text:
                continue
            tree = ast.parse(text)
            named = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
            banned = {"_stores", "stores"} if root == "session_server" else {"_stores"}
            found += [f"{path}:{node.lineno} {node.attr}" for node in named if node.attr in banned]
    assert not found
