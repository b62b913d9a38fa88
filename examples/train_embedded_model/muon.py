"""Muon for a few small matrices on a CPU (Keller Jordan 2024, kellerjordan.github.io/posts/muon).

The step of a matrix is its momentum with all singular values set to about one, computed by
a Newton-Schulz iteration. torch's own version iterates in bfloat16, which CPUs without
bfloat16 units emulate ten times slower; this one uses float32 and stacks matrices of equal
shape.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

# Coefficients of the quintic polynomial, chosen by its author for a steep slope at zero.
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS: Final = 5


class Muon:
    """Optimize matrices only; embeddings and gains need another optimizer."""

    def __init__(self, matrices: Iterable[Tensor], momentum: float = 0.95) -> None:
        groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            rows, columns = matrix.shape
            groups[min(rows, columns), max(rows, columns)].append(matrix)
        self._groups = list(groups.values())
        self._velocities = [torch.zeros(len(group), *shape) for shape, group in groups.items()]
        self._momentum = momentum

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every matrix from its gradient and clear the gradient."""
        for group, velocity in zip(self._groups, self._velocities, strict=True):
            gradient = torch.stack([_wide(_gradient_of(matrix)) for matrix in group])
            velocity.lerp_(gradient, 1 - self._momentum)
            updates = orthogonalized(gradient.lerp(velocity, self._momentum))
            for matrix, update in zip(group, updates, strict=True):
                rows, columns = matrix.shape
                scale = max(1.0, rows / columns) ** 0.5
                turned = update if rows <= columns else update.T
                matrix.add_(turned, alpha=-learning_rate * scale)
                matrix.grad = None

    def state(self) -> list[Tensor]:
        """Return the state that `restore` takes."""
        return self._velocities

    def restore(self, state: list[Tensor]) -> None:
        """Resume from a state taken from an optimizer of the same matrices."""
        for velocity, saved in zip(self._velocities, state, strict=True):
            velocity.copy_(saved)


def orthogonalized(stack: Tensor) -> Tensor:
    """Bring all singular values of each wide matrix near one: [n, rows, columns]."""
    linear, cubic, quintic = _COEFFICIENTS
    norms = torch.linalg.matrix_norm(stack, keepdim=True)
    update: Tensor = stack / (norms + 1e-7)
    for _ in range(NUM_ITERATIONS):
        square = update @ update.mT
        update = linear * update + (cubic * square + quintic * square @ square) @ update
    return update


def _wide(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    return matrix if rows <= columns else matrix.T


def _gradient_of(matrix: Tensor) -> Tensor:
    assert matrix.grad is not None, "step before backward"
    return matrix.grad
