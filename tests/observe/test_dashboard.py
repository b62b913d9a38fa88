"""The dashboard is what Grafana's own schema asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from tests.docs.tables import DASHBOARD
from tests.observe import dashboard
from tests.observe.promql import labels_of, metrics_of

SCHEMAS = Path(__file__).parent / "grafana"
MADE = dashboard.dashboard()
PANELS = [panel for panel in MADE["panels"] if panel["type"] != "row"]


def validator(name: str, definition: str) -> Draft7Validator:
    """What Grafana says of one type; see grafana/README.md."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    return Draft7Validator(
        {"$ref": f"#/definitions/{definition}", "definitions": schema["definitions"]}
    )


def problems(of: Draft7Validator, value: object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in of.iter_errors(value)]


def test_the_file_is_what_its_list_says() -> None:
    assert DASHBOARD.read_text("utf-8") == dashboard.text(), "run: python -m tests.docs.tables"
    assert json.loads(dashboard.text()) == MADE


def test_the_dashboard_is_valid_by_grafanas_schema() -> None:
    assert problems(validator("dashboard", "Dashboard"), MADE) == []


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_is_valid_by_the_schema_of_its_plugin(panel: Mapping[str, Any]) -> None:
    kind = panel["type"]
    assert problems(validator(kind, "Options"), panel["options"]) == []
    custom = panel["fieldConfig"]["defaults"]["custom"]
    if kind == "timeseries":
        assert problems(validator(kind, "FieldConfig"), custom) == []
    for target in panel["targets"]:
        assert problems(validator("prometheus", "Dataquery"), target) == []


def test_a_wrong_dashboard_is_found() -> None:
    wrong = json.loads(dashboard.text())
    wrong["panels"][1]["gridPos"]["w"] = 25
    wrong["panels"][1]["fieldConfig"]["defaults"]["thresholds"]["mode"] = "sometimes"
    wrong["colour"] = "red"
    assert len(problems(validator("dashboard", "Dashboard"), wrong)) == 2
    options = {**PANELS[-1]["options"], "legend": {"displayMode": "nowhere"}}
    assert problems(validator("timeseries", "Options"), options)


def test_panels_lie_beside_each_other_and_are_numbered_apart() -> None:
    ids = [panel["id"] for panel in MADE["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in MADE["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < dashboard.WIDTH
        taken |= cells


def test_an_expression_is_taken_apart() -> None:
    expression = 'sum by (code, le) (rate(session_server_x_bucket{a=~"session_server_y",b!="2"}))'
    assert metrics_of(expression) == {"session_server_x"}
    assert labels_of(expression) == {"code", "le", "a", "b"}
