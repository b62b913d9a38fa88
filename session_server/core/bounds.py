"""`Bound`: what a number in the settings counts, and what happens when it is reached.

`docs/limits.md` is generated from these annotations, from the constraints of the wire types and
from the named constants of the code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """Annotate a numeric setting: `Annotated[int, Bound("tokens", "...")]`.

    Args:
        unit: what is counted, in the plural: "tokens", "bytes", "seconds".
        at_limit: what happens to the work that reaches it, with the error code a client sees.
    """

    unit: str
    at_limit: str
