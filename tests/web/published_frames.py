"""What the server sends on its sockets, against the schemas that it publishes."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

from session_server.web.asyncapi import CHANNELS, schema_of

OTHER = ""
"""The type that has no tag."""


class PublishedFrames:
    """Checks what the server sends on one kind of socket against the schema it publishes."""

    def __init__(self, name: str) -> None:
        (channel,) = (each for each in CHANNELS if each.name == name)
        schema = schema_of(channel)
        kinds = schema["$defs"]["ServerMessage"]["anyOf"]
        self._checks = {}
        for kind in kinds:
            described = schema["$defs"][kind["$ref"].rpartition("/")[2]]
            (tag,) = described["properties"]["type"].get("enum", (OTHER,))
            one = Draft202012Validator({"$defs": schema["$defs"], **described})
            self._checks[tag] = one

    def check(self, frame: dict[str, Any]) -> None:
        """Raise `jsonschema.ValidationError` if a frame is not what is published."""
        check = self._checks.get(frame["type"], self._checks.get(OTHER))
        assert check is not None, "a type that is not published"
        check.validate(frame)
