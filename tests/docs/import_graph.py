"""The import graph of the packages, for docs/architecture.md: layers from the contract, arrows from
the imports of the code.

An arrow that follows from others is left out: where a imports b and c, and b imports c, only
a --> b --> c is drawn.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVER = "session_server"

Graph = dict[str, set[str]]


def graph_block() -> str:
    """Return the graph as a Mermaid block."""
    layers = layers_of_contract()
    graph = reduced(imports(node_of_prefix(layers)))
    drawn = {*graph, *(node for nodes in graph.values() for node in nodes)}

    def lines() -> Iterator[str]:
        yield "```mermaid"
        yield "flowchart TD"
        waiting = set(drawn)
        for index, layer in enumerate(layers):
            nodes = [node for node in dict.fromkeys(layer.values()) if node in waiting]
            waiting.difference_update(nodes)
            if len(nodes) > 1:
                yield f"  subgraph layer{index}[ ]"
                yield from (f"    {_shape(node)}" for node in nodes)
                yield "  end"
            else:
                yield from (f"  {_shape(node)}" for node in nodes)
        for node in sorted(graph):
            if graph[node]:
                yield f"  {_key(node)} --> {' & '.join(map(_key, sorted(graph[node])))}"
        yield "```"

    return "\n".join(lines())


def layers_of_contract() -> list[dict[str, str]]:
    """Return the layers, top first; each maps a module prefix to the node it is drawn as.

    All commands are one node, and so are the modules that read their flags.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    layers = []
    assert contract["type"] == "layers"
    for line in contract["layers"]:
        prefixes = line.replace("|", " ").replace(":", " ").split()
        layers.append({prefix: _node(prefix) for prefix in prefixes})
    # The folder of the embedded model, which the settings name.
    layers[-2] |= {f"{SERVER}.demo": "demo"}
    return layers


COMMANDS = "__main__ cli serve chat inspector auditor doctor demo.command bench"
COMMAND_LINE = "flags foreign_flags arguments progress local_server"


def _node(prefix: str) -> str:
    name = prefix.removeprefix(f"{SERVER}.")
    if name in COMMANDS.split():
        return "commands"
    return "command line" if name in COMMAND_LINE.split() else name


def _key(node: str) -> str:
    return node.replace(" ", "_")


def _shape(node: str) -> str:
    return f'{_key(node)}["{node}"]'


def node_of_prefix(layers: list[dict[str, str]]) -> dict[str, str]:
    """Return the node of every prefix, longest prefix first."""
    merged = {prefix: node for layer in layers for prefix, node in layer.items()}
    return dict(sorted(merged.items(), key=lambda item: -len(item[0])))


def imports(nodes: Mapping[str, str]) -> Graph:
    """Return which node imports which."""

    def node_of(module: str) -> str | None:
        found = (nodes[p] for p in nodes if module == p or module.startswith(f"{p}."))
        return next(found, None)

    graph: Graph = {}
    for module, targets in module_imports().items():
        node = node_of(module)
        if node is None:
            continue  # `session_server` itself: its version
        found = map(node_of, targets)
        graph.setdefault(node, set()).update(t for t in found if t not in (None, node))
    return graph


@cache
def module_imports() -> Graph:
    """Return which module imports which, read from the sources, functions included."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in (SERVER, "cache")
        for path in (ROOT / package).rglob("*.py")
    }
    return {
        module: set(_imported(path.read_text("utf-8"), modules)) for module, path in modules.items()
    }


def _imported(source: str, modules: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name in modules)
            case ast.ImportFrom() if node.module in modules:
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in modules else node.module
            case ast.Call(args=[ast.Constant(value=str(name))]) if name in modules:
                yield name  # importlib.import_module
            case _:
                pass


def reduced(graph: Graph) -> Graph:
    """Return the graph without arrows that others imply.

    Raises:
        ValueError: the graph has a circle.
    """
    below: dict[str, set[str]] = {}

    def reach(node: str, path: tuple[str, ...]) -> set[str]:
        if node in path:
            raise ValueError(f"a circle of imports: {' -> '.join((*path, node))}")
        if node not in below:
            direct = graph.get(node, set())
            below[node] = direct.union(*(reach(other, (*path, node)) for other in direct))
        return below[node]

    return {
        node: {t for t in targets if not any(t in reach(other, (node,)) for other in targets)}
        for node, targets in graph.items()
    }
