"""Every test of a kernel runs on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from session_server.runner.native import _native


@pytest.fixture(params=_native.cpus())
def cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of one instruction set, on one thread."""
    before = _native.cpu()
    _native.use_cpu(request.param)
    yield request.param
    _native.use_cpu(before)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Kernels on one thread, and on more than there are cores."""
    before = _native.num_threads()
    _native.set_num_threads(request.param)
    yield request.param
    _native.set_num_threads(before)
