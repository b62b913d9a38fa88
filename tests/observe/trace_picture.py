"""Draw the trace of one turn: `python -m tests.observe.trace_picture` writes docs/assets/trace.svg
from what a server process exported."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from session_server.local_server import LocalServer
from tests.docs.published import DOCS
from tests.observe.collector import Collector, SeenSpan, of_turn
from tests.web.wire_client import greeted

PICTURE = DOCS / "assets/trace.svg"
FLAGS = ["--threads", "1", "--log-level", "warning", "--chunked-prefill-size", "256"]
LEFT, WIDTH, ROW, TOP = 190, 640, 26, 58
COLORS = {
    "receive": "#8a8f98",
    "submit": "#5b7fbf",
    "render and tokenize": "#8aa6d6",
    "wait for turn": "#8aa6d6",
    "queue": "#c9a227",
    "prefill": "#d17b3f",
    "decode": "#3f9a6a",
    "settle": "#8a8f98",
    "deliver": "#7a5ba8",
}
STYLE = """
text{font:13px system-ui,sans-serif;fill:#1f2328}.dim{fill:#59636e;font-size:12px}
.line{stroke:#d1d9e0}.page{fill:#ffffff}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}.line{stroke:#3d444d}
.page{fill:#0d1117}}
"""


async def converse(url: str) -> None:
    """Two turns; the second goes on from the first."""
    sampling = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    async with greeted(url) as wire:
        for turn_id, num_tokens in (("first", 600), ("second", 700)):
            ids = [20 + index % 1000 for index in range(num_tokens)]
            await wire.turn(turn_id, input_ids=ids, sampling=sampling)
        await wire.send("ping")
        await wire.until("pong")


def picture(spans: Sequence[SeenSpan], turn_id: str) -> str:
    """An SVG with a bar for each span, in the order of their beginnings."""
    root, *children = of_turn(spans, turn_id)
    rows: list[tuple[int, SeenSpan]] = [(0, root)]
    for child in children:
        below = [span for span in spans if span.parent_id == child.span_id]
        rows += [(1, child), *((2, each) for each in sorted(below, key=lambda s: s.begin_ns))]
    end_ns = max(span.end_ns for _, span in rows)
    scale = WIDTH / (end_ns - root.begin_ns)
    height = TOP + ROW * len(rows) + 14
    said = root.attributes
    title = (
        f"{root.name}: {said['gen_ai.usage.input_tokens']} tokens in, "
        f"{said['gen_ai.usage.cache_read.input_tokens']} of them cached, "
        f"{said['gen_ai.usage.output_tokens']} out"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 96} {height}" '
        f'role="img" aria-label="{title}">',
        f"<style>{STYLE}</style>",
        '<rect class="page" width="100%" height="100%"/>',
        f'<text x="12" y="22" font-weight="600">{title}</text>',
        f'<text class="dim" x="12" y="42">trace {root.trace_id}</text>',
    ]
    for index, (depth, span) in enumerate(rows):
        y = TOP + ROW * index
        x = LEFT + (span.begin_ns - root.begin_ns) * scale
        width = max(1.5, (span.end_ns - span.begin_ns) * scale)
        name = "turn" if span is root else span.name
        color = COLORS.get(span.name, "#59636e")
        lines += [
            f'<line class="line" x1="12" x2="{LEFT + WIDTH + 84}" y1="{y}" y2="{y}"/>',
            f'<text x="{12 + 14 * depth}" y="{y + 17}">{name}</text>',
            f'<rect x="{x:.1f}" y="{y + 6}" width="{width:.1f}" height="14" rx="2" '
            f'fill="{color}"/>',
            f'<text class="dim" x="{x + width + 5:.1f}" y="{y + 17}">'
            f"{(span.end_ns - span.begin_ns) / 1e6:.2f} ms</text>",
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Run a server and a conversation, and draw its second turn."""
    with Collector() as collector:
        flags = [*FLAGS, "--otlp-traces-endpoint", collector.url]
        with LocalServer(flags) as server:
            asyncio.run(converse(server.url))
        spans = collector.wait_for("deliver")
    PICTURE.write_text(picture(spans, "second"), "utf-8")
    for span in of_turn(spans, "second"):
        print(f"{span.name:28} {(span.end_ns - span.begin_ns) / 1e6:8.2f} ms  {span.attributes}")


if __name__ == "__main__":
    main()
