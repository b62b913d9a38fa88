"""How much a run tries: `make test` a part that holds every pair of settings, `make prove` all.

A setting that breaks something does so alone, or together with one other. Where tests are drawn
from the product of several settings, `make test` takes combinations that hold every pair of values
somewhere. With `PROVE=1` in the environment the same tests take the whole product.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, Final, TypeVar

IS_PROOF: Final = os.environ.get("PROVE") == "1"

Value = TypeVar("Value")

Pair = tuple[int, object, int, object]


def at_depth(usual: Value, *, proof: Value) -> Value:
    """Return the size or the cases of a test: `usual` in `make test`, `proof` in `make prove`."""
    return proof if IS_PROOF else usual


def cases(*settings: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return the combinations of settings that this run tries, in the order of their product.

    Args:
        settings: the values that each setting can take, all hashable.
    """
    everything = list(product(*settings))
    return everything if IS_PROOF else pairwise(everything)


def each_value(*settings: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that hold every value of each setting; in a proof their whole product.

    For what does not depend on the settings, and is tried with all of them to be sure.
    """
    if IS_PROOF:
        return list(product(*settings))
    number = max(map(len, settings))
    return [tuple(values[i % len(values)] for values in settings) for i in range(number)]


def pairwise(everything: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Choose few combinations that hold every pair of values that is in any of `everything`.

    Each choice holds as many missing pairs as any could; of equals the first is taken.
    """
    pairs = [pairs_of(case) for case in everything]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(pairs)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return [everything[index] for index in sorted(chosen)]


def pairs_of(case: Sequence[object]) -> set[Pair]:
    """Return every two values of a combination with the settings they belong to."""
    return {(i, a, k, b) for (i, a), (k, b) in combinations(enumerate(case), 2)}
