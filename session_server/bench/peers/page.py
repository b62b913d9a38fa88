"""Write a report into a page of Markdown, and draw it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from session_server.bench.peers.report import COLUMNS, OWN_COLUMNS, heading, own_rows, rows_of

BEGIN: Final = "<!-- peers: generated, `session-server bench peers --markdown` -->"
END: Final = "<!-- end of peers -->"


class NoSection(Exception):
    """Report that a page has no section to write to, and how to give it one."""


def check_page(path: Path) -> None:
    """Check that a page can be written to, before anything is measured.

    Raises:
        NoSection: it is missing, or has not one section.
    """
    text = path.read_text() if path.is_file() else ""
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise NoSection(
            f"--markdown {path}: it needs one section to write to, two lines of their own:\n"
            f"{BEGIN}\n{END}"
        )


def write_section(path: Path, report: Mapping[str, Any], command: str) -> None:
    """Replace what stands between the marks of a page. `command`: what to run to get it again."""
    check_page(path)
    before, _, rest = path.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = "\n".join(section(report, command))
    path.write_text(f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}")


def section(report: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield the lines of a report as Markdown."""
    yield f"{heading(report)}: `{command}`."
    for model, rows in report["models"].items():
        for row, cells in rows.items():
            yield ""
            yield f"Model `{model}`, our weights in {row}:"
            yield ""
            yield from _table(COLUMNS, rows_of(cells))
    if report["own"]:
        yield ""
        yield "What a session costs:"
        yield ""
        yield from _table(OWN_COLUMNS, own_rows(report))
    if report["not_measured"]:
        yield ""
        yield from (f"* Not measured: {reason}" for reason in report["not_measured"])


def plot_ratios(report: Mapping[str, Any], path: Path) -> None:
    """Draw the ratio of every cell that has a peer, one panel for each model.

    Raises:
        ImportError: matplotlib is not installed (`pip install session-server[dev]`).
    """
    from matplotlib import pyplot as plt

    num_models = max(1, len(report["models"]))
    figure, panels = plt.subplots(
        1, num_models, figsize=(8 * num_models, 6), layout="constrained", squeeze=False
    )
    for axes, (model, rows) in zip(panels[0], report["models"].items(), strict=False):
        axes.axvline(1.0, color="gray", linewidth=0.8)
        for row, cells in rows.items():
            ratios = {name: c["ratio"] for name, c in cells.items() if c["ratio"] is not None}
            axes.plot(list(ratios.values()), list(ratios), "o", label=row)
        axes.invert_yaxis()
        axes.set(title=model, xlabel="times better than the best peer", xscale="log")
        if rows:
            axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _line(columns)
    yield _line(["---"] * len(columns))
    yield from map(_line, rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
