"""What is installed is what works: the wheel alone, without the checkout and without extras."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from session_server.cli import COMMANDS
from session_server.web import pages
from tests.depth import at_depth
from tests.docs.import_graph import module_imports

REPOSITORY = Path(__file__).resolve().parents[2]

NOT_AT_RUN_TIME = ("transformers", "openai", "matplotlib", "hypothesis", "pytest", "psutil")

BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_AT_RUN_TIME!r}:
            raise ImportError(name + " is not there at run time")
        return None

# The finder of an editable install would find the checkout first.
editable = [finder for finder in sys.meta_path if "Editable" in type(finder).__name__
            or "Redirecting" in type(finder).__name__]
for finder in editable:
    sys.meta_path.remove(finder)
sys.meta_path.insert(0, Blocker())
"""


UNOPTIMIZED = (
    "cmake.build-type=None",
    "cmake.define.SESSION_SERVER_OPTIMIZE=-O0",
    *("cmake.define.CMAKE_UNITY_BUILD=ON", "cmake.define.CMAKE_UNITY_BUILD_BATCH_SIZE=0"),
)
BUILD: tuple[str, ...] = at_depth(UNOPTIMIZED, proof=())
"""The same sources are compiled together and in a quarter of the time; the environment that tests
run in was built with the usual settings."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built in a clean copy so that no build leftovers enter."""
    source = tmp_path_factory.mktemp("source")
    for name in ("session_server", "cache", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(REPOSITORY / name), str(source)], check=True)
    target = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    settings = [f"--config-settings={setting}" for setting in BUILD]
    subprocess.run([*build, str(target), *settings, str(source)], check=True)
    return next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's contents and a blocker for what only developers have."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return folder


@pytest.fixture
def environment(installed: Path) -> Mapping[str, str]:
    """Python finds the installed wheel before the checkout, and none of the extras."""
    return os.environ | {"PYTHONPATH": str(installed), "PYTHONUNBUFFERED": "1"}


def test_the_wheel_holds_both_packages_the_model_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "session_server/demo/model/model.safetensors" in names
    assert "session_server/demo/model/chat_template.jinja" in names
    assert "session_server/py.typed" in names
    assert "cache/session_cache.py" in names
    static = "session_server/web/static/"
    assert {static + name for name in pages.FILES} <= set(names)
    assert [name for name in names if name.startswith("session_server/runner/native/_native.")]
    assert not [name for name in names if name.endswith((".cpp", ".h", "CMakeLists.txt"))]
    assert not [name for name in names if name.startswith(("tests/", "examples/", "docs/"))]


def test_the_wheel_holds_what_serves_and_neither_the_simulator_nor_the_trainer(wheel: Path) -> None:
    sources = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    demo = {name for name in sources if name.startswith("session_server/demo/")}
    assert {Path(name).stem for name in demo} == {"__init__", "command", "corpus", "vocabulary"}
    assert "session_server/bench/command.py" in sources
    assert not [name for name in sources if "/sim/" in name or Path(name).stem.startswith("test_")]


NAMED_IN_TEXT = {"session_server.deploy.router", "session_server.parallel.rank"}
"""What Ray Serve imports by a path that it is given, and what a process of its own runs."""


def test_the_wheel_holds_nothing_that_no_command_imports(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = {name for name in names if name.endswith(".py")}
    assert {name.partition("/")[0] for name in files} == {"cache", "session_server"}
    graph = module_imports()
    reached: set[str] = set()
    ahead = {"session_server.__main__", *(command.module for command in COMMANDS.values())}
    ahead |= NAMED_IN_TEXT
    while ahead:
        reached |= ahead
        ahead = set().union(*(graph[module] for module in ahead)) - reached
    # Python imports the packages above a module before it.
    reached |= {".".join(m.split(".")[:n]) for m in reached for n in range(1, m.count(".") + 1)}
    module_of = {name: name.removesuffix(".py").replace("/", ".") for name in files}
    held = {module.removesuffix(".__init__") for module in module_of.values()}
    assert held == reached


def test_the_wheel_is_what_python_imports(
    environment: Mapping[str, str], installed: Path, tmp_path: Path
) -> None:
    code = "import cache, session_server; print(cache.__file__); print(session_server.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert all(Path(path).is_relative_to(installed) for path in found)


@pytest.fixture
def served(environment: Mapping[str, str], tmp_path: Path) -> Iterator[str]:
    """Address of `session-server serve` run from the wheel, in a folder that is not ours."""
    process = subprocess.Popen(
        [sys.executable, "-m", "session_server", "serve", "--port", "0"],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "listening on " in line:
            break
    else:
        process.communicate(timeout=60)
        pytest.fail("the server ended:\n" + "".join(seen))
    yield line.rpartition("listening on ")[2].split()[0]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_wheel_serves_the_embedded_model_without_the_extras(served: str) -> None:
    with httpx.Client(base_url=served, timeout=60) as http:
        session = http.post("/v1/sessions", json={}).json()
        turns = f"/v1/sessions/{session['id']}/turns"
        greedy = {"temperature": 0, "max_tokens": 32}
        for text in ("My city is Oslo.", "What is my city?"):
            body = {"input": [{"role": "user", "content": text}], "sampling": greedy}
            answer = http.post(turns, json=body)
            assert answer.status_code == 200, answer.text
        assert "Oslo" in answer.text
        assert http.delete(f"/v1/sessions/{session['id']}").status_code in {200, 202, 204}
