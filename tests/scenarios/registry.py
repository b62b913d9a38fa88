"""Which story shows which scenario of the catalogue, and what guards it.

    @scenario("S4", LOCK_SKIPS_ITSELF)
    def test_s4_a_node_in_use_is_not_evicted() -> None: ...

A story is a test without arguments. Each of its guards is the mutant that takes away what makes the
story end well; `test_catalogue.py` runs every story under every guard and expects it to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tests.mutants.mutant import Mutant
from tests.scenarios.catalogue import CATALOGUE

Story = Callable[[], None]

_FOUND: dict[tuple[str, str], Scenario] = {}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One registered story of the scenario `id`."""

    id: str
    story: Story
    guards: tuple[Mutant, ...]

    @property
    def name(self) -> str:
        """The test's name."""
        return self.story.__name__

    @property
    def claim(self) -> str:
        """What the story shows, in words."""
        return self.name.removeprefix(f"test_{self.id.lower()}_").replace("_", " ")


def scenario(scenario_id: str, *guards: Mutant) -> Callable[[Story], Story]:
    """Register a test as a story of one scenario, with the mutants that each must break it."""
    assert scenario_id in CATALOGUE, f"there is no scenario {scenario_id}"
    assert guards, "a story that nothing guards shows nothing"

    def register(story: Story) -> Story:
        prefix = f"test_{scenario_id.lower()}_"
        assert story.__name__.startswith(prefix), f"{story.__name__} does not start with {prefix}"
        _FOUND[scenario_id, story.__name__] = Scenario(scenario_id, story, guards)
        return story

    return register


def scenarios() -> list[Scenario]:
    """Every registered story, in the order of the catalogue."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if path.stem != "test_catalogue":
            import_module(f"tests.scenarios.{path.stem}")
    order = list(CATALOGUE)
    return sorted(_FOUND.values(), key=lambda found: (order.index(found.id), found.name))
