"""Put together from the engine's steps what each forward computed for whom, in what time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from session_server.core.events import TracedRow, TracedStep
from session_server.core.ids import TurnId
from session_server.protocol.operations import (
    ForwardBody,
    ForwardRow,
    ForwardsBody,
    ForwardTurn,
    RowKind,
)
from session_server.sessions.turn_names import TurnName

MAX_UNSETTLED: Final = 8
"""Forwards that wait for their results at most; older ones were lost with an engine."""


class Timeline:
    """Follow the forwards of one engine. A forward is told of once its result was taken.

    `last_step`: the newest step that was read.
    """

    def __init__(self, name_of: Callable[[TurnId], TurnName | None]) -> None:
        self._name_of = name_of
        self._launched: dict[int, TracedStep] = {}
        self.last_step = 0

    def clear(self) -> None:
        """Begin with another engine."""
        self._launched.clear()
        self.last_step = 0

    def read(self, steps: Iterable[TracedStep]) -> ForwardsBody:
        """Return the forwards that ended in these steps, which follow those read before."""
        places: dict[TurnId, int] = {}
        names: list[TurnName | None] = []
        forwards = []
        for step in steps:
            self.last_step = step.step
            for number, forward_s in zip(step.settled, step.forward_s, strict=True):
                launch = self._launched.pop(number, None)
                if launch is None:
                    continue
                rows = tuple(self._row(row, places, names) for row in launch.rows)
                ms = round(forward_s * 1e3, 3)
                start_s = round(launch.now_s, 4)
                forwards.append(
                    ForwardBody(number=number, start_s=start_s, forward_ms=ms, rows=rows)
                )
            if step.launched is not None:
                self._launched[step.launched] = step
                if len(self._launched) > MAX_UNSETTLED:
                    del self._launched[next(iter(self._launched))]
        turns = tuple(
            ForwardTurn(turn_id=None, session=None)
            if name is None
            else ForwardTurn(turn_id=name.turn_id, session=name.session_id)
            for name in names
        )
        return ForwardsBody(turns=turns, forwards=tuple(forwards))

    def _row(
        self, row: TracedRow, places: dict[TurnId, int], names: list[TurnName | None]
    ) -> ForwardRow:
        place = places.setdefault(row.turn_id, len(names))
        if place == len(names):
            names.append(self._name_of(row.turn_id))
        return ForwardRow(place, row.num_tokens, _kind_of(row, names[place]))


def _kind_of(row: TracedRow, name: TurnName | None) -> RowKind:
    if name is not None and name.is_draft:
        return "draft"
    is_prompt = row.num_tokens - row.num_drafts > 1 or not row.sample
    return "prefill" if is_prompt else "decode"
