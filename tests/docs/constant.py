"""One bound that is a constant of the code, for docs/limits.md."""

from __future__ import annotations

import importlib
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from typing import Any


@dataclass(frozen=True)
class Constant:
    """One bound that is no setting.

    `path`: `module:NAME`, or `module:Class.field` for the default of a dataclass field. `unit`
    follows the value.
    """

    path: str
    what: str
    unit: str
    at_limit: str

    @property
    def value(self) -> float:
        """Read the number from the code."""
        module_name, _, name = self.path.partition(":")
        owner, _, field_name = name.partition(".")
        found: Any = getattr(importlib.import_module(module_name), owner)
        if field_name:
            (field,) = (f for f in dataclass_fields(found) if f.name == field_name)
            assert field.default is not MISSING, self.path
            found = field.default
        assert isinstance(found, int | float), self.path
        return found


def constant(path: str, what: str, unit: str, at_limit: str) -> Constant:
    """Return a constant of the server, whose path leaves `session_server.` out."""
    return Constant(f"session_server.{path}", what, unit, at_limit)
