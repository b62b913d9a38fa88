"""What random mutation relies on; mutants themselves are drawn by `make mutation`."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.report import change, equivalents
from tests.mutation.stages import NEIGHBORS, serving_files, stages

ROOT = Path(__file__).resolve().parents[2]


def test_each_serving_package_has_tests_of_its_own_and_neighbors_that_exist() -> None:
    packages = serving_files(ROOT)
    assert packages.keys() == NEIGHBORS.keys()
    for package, files in packages.items():
        tests = [test for group in stages(ROOT, files[-1]) for test in group]
        assert len(tests) == len(set(tests))
        for neighbor in NEIGHBORS[package].split():
            assert any(test.startswith(f"tests/{neighbor}/") for test in tests), neighbor


def test_tests_that_import_the_mutated_file_come_first() -> None:
    first, second, *_ = stages(ROOT, Path("cache/ledger.py"))
    assert "tests/cache/test_ledger.py" in first
    assert "tests/cache/test_states.py" in second
    assert stages(ROOT, Path("session_server/auditor.py"))[0] == ["tests/test_auditor.py"]


def test_a_change_is_known_by_its_text() -> None:
    diff = "--- \n+++ \n@@ -7 +7 @@\n-    return 1\n+    return 2"
    assert change(diff, Path("cache/lease.py")) == ("cache/lease.py", "return 1", "return 2")


def test_equivalent_mutants_are_of_lines_that_stand_in_the_code() -> None:
    for (file, was, _), because in equivalents().items():
        text = " ".join(line.strip() for line in (ROOT / file).read_text("utf-8").splitlines())
        assert was in text, f"{file} no longer has: {was}"
        assert because
