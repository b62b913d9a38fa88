"""Draw mutants evenly over the serving packages, with the operators of cosmic-ray."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.work_item import MutationSpec

from tests.mutation.stages import serving_files

OPERATORS = {
    name: get_operator(name)() for name in operator_names() if not get_operator(name).arguments()
}
FLAGS: Final = {"frozen", "kw_only", "slots"}
Position = tuple[int, int]
Site = tuple[Path, Position, str]
"""A file, where in it, and the kind of operator: eleven ways to replace one `+` are one site."""


def draw(root: Path, seed: int) -> Iterator[MutationSpec]:
    """Yield mutants without end, so that a longer sample begins with every shorter one.

    A package gets its next mutant when its lines exceed its share (Sainte-Lague's method). Within a
    package, each site is as likely as any other, and is drawn once.
    """
    files = serving_files(root)
    lines = {
        package: sum(len((root / path).read_text("utf-8").splitlines()) for path in paths)
        for package, paths in files.items()
    }
    pending = {package: _shuffled(root, files[package], f"{seed} {package}") for package in files}
    taken = dict.fromkeys(files, 0)
    while pending:
        package = max(pending, key=lambda name: lines[name] / (2 * taken[name] + 1))
        spec = next(pending[package], None)
        if spec is None:
            del pending[package]
            continue
        taken[package] += 1
        yield spec


def _shuffled(root: Path, paths: list[Path], seed: str) -> Iterator[MutationSpec]:
    """Yield one mutant of each site of these files in random order."""
    sites: dict[Site, list[MutationSpec]] = defaultdict(list)
    for path in paths:
        for spec in _mutants((root / path).read_text("utf-8"), path):
            sites[path, spec.start_pos, spec.operator_name.split("_")[0]].append(spec)
    chosen = random.Random(seed)
    for site in chosen.sample(sorted(sites), len(sites)):
        spec = chosen.choice(sites[site])
        if _changes_the_program((root / spec.module_path).read_text("utf-8"), spec):
            yield spec


def _mutants(source: str, path: Path) -> Iterator[MutationSpec]:
    """Yield all mutants of a file except those that no run of it can notice."""
    ignored = list(_ignored(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in OPERATORS.items():
        spans = (span for node in nodes for span in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(spans):
            if start < end and not any(
                first <= start < last and marker in name for first, last, marker in ignored
            ):
                yield MutationSpec(path, name, occurrence, start, end)


def _ignored(tree: ast.Module) -> Iterator[tuple[Position, Position, str]]:
    """Yield spans, and the operators that change nothing in them: `|` in annotations, which are not
    evaluated, flags of classes that only restrict how they may be used, and all in protocols."""
    for node in ast.walk(tree):
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for annotation in annotations:
            if isinstance(annotation, ast.expr):
                yield (*_span(annotation), "_BitOr_")
        if isinstance(node, ast.ClassDef):
            if any("Protocol" in ast.dump(base) for base in node.bases):
                yield (node.lineno, 0), (node.end_lineno or 0, 1000), ""
            flags = [
                decorator for decorator in node.decorator_list if "dataclass" in ast.dump(decorator)
            ]
            flags += [keyword.value for keyword in node.keywords if keyword.arg in FLAGS]
            for flag in flags:
                yield (*_span(flag), "ReplaceTrueWithFalse")


def _span(node: ast.expr) -> tuple[Position, Position]:
    """Return the start and the end of a node."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _changes_the_program(source: str, spec: MutationSpec) -> bool:
    """Say whether the mutated file compiles, and to something else than before."""
    mutated = mutate_code(source, OPERATORS[spec.operator_name], spec.occurrence)
    try:
        return mutated is not None and ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False
