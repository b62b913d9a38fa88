"""Which metrics and labels an expression names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "examples" / "deploy"
BY_PROMETHEUS = {"instance", "job", "le"}
"""Labels that a scrape or a histogram adds."""

_METRIC = re.compile(r"\b(?:session_server|process)_\w+")
_MATCHERS = re.compile(r"\{([^}]*)\}")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPS = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def metrics_of(expression: str) -> set[str]:
    """The metrics of an expression, without the suffix of a histogram's series."""
    names = _METRIC.findall(re.sub(r'"[^"]*"', '""', expression))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def labels_of(expression: str) -> set[str]:
    """The labels that it matches or groups by."""
    matched = {
        label for group in _MATCHERS.findall(expression) for label in _MATCHER.findall(group)
    }
    grouped = {label.strip() for group in _GROUPS.findall(expression) for label in group.split(",")}
    return matched | grouped


def alerts() -> list[dict[str, Any]]:
    """The rules of the example."""
    rules = yaml.safe_load((DEPLOY / "prometheus-alerts.yml").read_text("utf-8"))
    return [rule for group in rules["groups"] for rule in group["rules"]]
