"""The graph of the architecture page has every package, and no arrow too many."""

from __future__ import annotations

import pytest

from tests.docs.import_graph import ROOT, graph_block, reduced


def test_every_package_is_drawn_once() -> None:
    folders = {path.parent.name for path in (ROOT / "session_server").glob("*/__init__.py")}
    in_commands = {"bench", "inspector"}
    lines = graph_block().splitlines()
    for node in {"cache", "commands", *folders} - in_commands:
        assert sum(line.strip() == f'{node}["{node}"]' for line in lines) == 1, node


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}}
    assert reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}}
    diamond = {"a": {"b", "c"}, "b": {"d"}, "c": {"d"}}
    assert reduced(diamond) == diamond


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="a -> b -> a"):
        reduced({"a": {"b"}, "b": {"a"}})
