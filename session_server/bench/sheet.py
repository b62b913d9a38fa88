"""Declare what a benchmark shows: tables whose cells are formats of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from rich.table import Table

from session_server.terminal import make_table

Figures = Mapping[str, Any]


class Sheet(NamedTuple):
    """Declare one table. `title` is a format of the whole report.

    `rows`: what the rows show, in dictionaries nested as deep as there are `keys`, the columns of
    their names. `columns`: the format of each further cell, of the figures of its row.
    """

    title: str
    rows: Callable[[Figures], Figures]
    keys: tuple[str, ...]
    columns: Mapping[str, str]

    def table(self, report: Figures) -> Table:
        """Return the table of a report."""
        rows = (
            (*names, *(cell.format_map(figures) for cell in self.columns.values()))
            for names, figures in _leaves(self.rows(report), len(self.keys))
        )
        title = self.title.format_map(report)
        return make_table((*self.keys, *self.columns), rows, title=title)


def _leaves(figures: Figures, depth: int) -> Iterator[tuple[tuple[str, ...], Figures]]:
    if depth == 0:
        yield (), figures
        return
    for name, below in figures.items():
        for names, leaf in _leaves(below, depth - 1):
            yield (name, *names), leaf
