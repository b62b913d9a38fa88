"""JSON Schemas of the structs that encode and decode the wire format."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import msgspec


def schemas_of(kinds: Iterable[Any], template: str) -> dict[str, Any]:
    """Return the schemas of types, and of all that they contain, by name. `template`: how one
    refers to another, with `{name}`."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=template)
    for schema in schemas.values():
        if "description" in schema:
            # msgspec before 0.23 has a docstring there as it is indented in the source.
            schema["description"] = inspect.cleandoc(schema["description"])
    return schemas
