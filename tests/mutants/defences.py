"""Checks taken away. Without them nothing goes wrong until something else does, so only the stories
of the scenarios meet these mutants, and the gate does not.
"""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant

DOUBLE_FREE_PASSES = Mutant(
    "A page named twice, or free already, can be given back.",
    "vllm#42571 (D3)",
    Edit(
        "cache.pages:PageAllocator.release",
        "if doubled or released[0] <= NULL_PAGE or self._is_free[released].any():",
        "if released[0] <= NULL_PAGE:",
    ),
)

SENTINEL_PASSES = Mutant(
    "The padding page, or a page id that is none, can be given back.",
    "sglang#40250 (D4)",
    Edit("cache.pages:PageAllocator.release", "released[0] <= NULL_PAGE or ", ""),
)

SECOND_UNLOCK_PASSES = Mutant(
    "A lock receipt can be given back twice.",
    "sglang#27025 (S2)",
    Edit("cache.radix:RadixCache.unlock", "if receipt._is_released:", "if False:"),
)

GUESSES_WITHOUT_A_WAY_BACK = Mutant(
    "Turns guess although a layer cannot forget a rejected token.",
    "mlx-lm#1109 (A10)",
    Edit(
        "cache.components:can_take_back",
        "all(component.rewind_len(2, 1) == 1 for component in components)",
        "any(True for component in components)",
    ),
)
