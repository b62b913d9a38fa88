"""Put a bug into a module: other text in place of some of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Seed = Callable[[pytest.MonkeyPatch], None]
"""Put a bug in, for as long as the patch lasts."""


def replaced(module: ModuleType, text: str, with_: str, *names: str) -> Seed:
    """Return what puts `with_` in place of `text`, which the module has once, for what has these
    names: functions, or `Class.method`."""

    def seed(patch: pytest.MonkeyPatch) -> None:
        assert module.__file__ is not None
        source = Path(module.__file__).read_text("utf-8")
        assert source.count(text) == 1, text
        made: dict[str, Any] = dict(vars(module))
        exec(compile(source.replace(text, with_), module.__file__, "exec"), made)
        for name in names:
            owner, _, attribute = name.rpartition(".")
            place = getattr(module, owner) if owner else module
            new = getattr(made[owner], attribute) if owner else made[attribute]
            patch.setattr(place, attribute, new)

    return seed
