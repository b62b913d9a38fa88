"""The published documents are what the server serves, valid, and complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from session_server.web.asyncapi import CHANNELS
from tests.docs.published import DOCS, files

FILES = files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_document_is_what_the_code_says(path: Path) -> None:
    assert path.read_text("utf-8") == FILES[path], "run: python -m tests.docs.tables"


def test_no_document_is_left_over() -> None:
    assert set(DOCS.rglob("*.json")) == set(FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_reference_leads_to_a_valid_schema(path: Path) -> None:
    document = json.loads(FILES[path])
    schemas = document.get("$defs") or document.get("components", {}).get("schemas", {})
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    for reference in references(document):
        file, _, pointer = reference.partition("#/")
        place = json.loads(FILES[path.parent / file]) if file else document
        for step in pointer.split("/"):
            place = place[step]


def references(place: Any) -> list[str]:
    """Every `$ref` in a document."""
    if isinstance(place, list):
        return [found for each in place for found in references(each)]
    if not isinstance(place, dict):
        return []
    own = [place["$ref"]] if isinstance(place.get("$ref"), str) else []
    return own + [found for each in place.values() for found in references(each)]


def test_every_field_of_a_sockets_query_is_described() -> None:
    refused = {"call_id"}
    web = DOCS.parent / "session_server" / "web"
    for channel, file in zip(CHANNELS, ("websocket.py", "realtime.py"), strict=False):
        read = re.findall(r'query\.get\("(\w+)"\)', (web / file).read_text("utf-8"))
        assert set(channel.query) == set(read) - refused, channel.name


def test_every_message_of_a_socket_has_its_schema() -> None:
    document = json.loads(FILES[DOCS / "asyncapi.json"])
    for channel in CHANNELS:
        schema = json.loads(FILES[DOCS / "schemas" / f"{channel.name}.json"])["$defs"]
        messages = document["channels"][channel.name]["messages"]
        for name, message in messages.items():
            kind = message["payload"]["schema"]["$ref"].rpartition("/")[2]
            assert schema[kind]["properties"]["type"].get("enum", [kind]) == [name]
        told = [
            each["$ref"].rpartition("/")[2]
            for action in ("receive", "send")
            for each in document["operations"][f"{action}:{channel.name}"]["messages"]
        ]
        assert sorted(told) == sorted(messages)


def test_the_ways_to_say_who_connects_are_those_that_the_sockets_take() -> None:
    document = json.loads(FILES[DOCS / "asyncapi.json"])
    ways = document["components"]["securitySchemes"]
    offered = f"{ways['offeredKey']['description']} {ways['ticket']['description']}"
    told = set(re.findall(r"[a-z-]+\.(?=KEY|TICKET)", offered))
    web = DOCS.parent / "session_server" / "web"
    taken = re.findall(
        r'_PROTOCOL: Final = "([a-z-]+\.)"',
        "".join((web / file).read_text("utf-8") for file in ("requests.py", "realtime.py")),
    )
    assert told == set(taken)
    assert "POST /v1/ws-ticket" in ways["ticket"]["description"]
    for operation in document["operations"].values():
        named = [each["$ref"].rpartition("/")[2] for each in operation["security"]]
        assert named == list(ways)
