"""Ranks that die, hang or fail: rank 0 ends its forward with what ends the engine, never with a
step that is tried again."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from session_server.demo import MODEL_DIR
from session_server.parallel import group
from session_server.parallel.group import RankLost
from session_server.parallel.loading import load_over, torch_options
from session_server.parallel.ranks import Ranks
from session_server.runner.loader import LoadedRunner, RunnerOptions
from tests.rig.processes import assert_gone
from tests.runner.rows import Rows

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = RunnerOptions(page_size=16, num_rows=4, device="cpu", max_context_len=512)
TOKENS = np.arange(3, 40, dtype=np.int32)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two ranks; a parameter says how long rank 0 waits for the other."""
    patience_s = getattr(request, "param", group.COLLECTIVE_TIMEOUT_S)
    monkeypatch.setattr(group, "COLLECTIVE_TIMEOUT_S", patience_s)
    found = Ranks(2, torch.device("cpu"))
    yield found
    for pid in found.pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found.close()


def loaded(ranks: Ranks) -> LoadedRunner:
    return load_over(ranks, MODEL_DIR, torch_options(OPTIONS, 2))


def test_a_rank_that_is_killed_ends_the_forward_and_is_reported_at_once(ranks: Ranks) -> None:
    rows = Rows(loaded(ranks).runner, page_size=16)
    rows.compute(1, TOKENS, (20, 17))
    reported: queue.Queue[BaseException] = queue.Queue()
    ranks.watch(reported.put)
    os.kill(ranks.pids[0], signal.SIGKILL)
    assert str(reported.get(timeout=30)) == "rank 1 is gone"
    with pytest.raises(RankLost, match="a rank is gone"):
        rows.run(rows.row(1, TOKENS[:1], start=37))


def test_a_rank_that_does_not_come_up_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("session_server.parallel.ranks.PROGRAM", (sys.executable, "-c", "exit(3)"))
    with pytest.raises(RankLost, match=r"rank 1 (is gone|does not answer)"):
        Ranks(2, torch.device("cpu"))


@pytest.mark.parametrize("ranks", [6.0], indirect=True)
def test_a_rank_that_hangs_ends_the_forward(ranks: Ranks) -> None:
    rows = Rows(loaded(ranks).runner, page_size=16)
    rows.compute(1, TOKENS, (20,))
    os.kill(ranks.pids[0], signal.SIGSTOP)
    with pytest.raises(RankLost, match="a rank is gone or hangs"):
        rows.run(rows.row(1, TOKENS[20:21], start=20))


def test_what_rank_0_fails_at_alone_ends_the_forward_for_all(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = loaded(ranks).runner
    rows = Rows(runner, page_size=16)

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("session_server.models.decoder.Decoder.forward", fail)
    with pytest.raises(RankLost, match="rank 0 failed in a forward: no room"):
        rows.run(rows.row(1, TOKENS))


def test_ranks_that_are_stopped_are_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("session_server.parallel.ranks.EXIT_PATIENCE_S", 1.0)
    ranks = Ranks(3, torch.device("cpu"))
    for pid in ranks.pids:
        os.kill(pid, signal.SIGSTOP)
    started_s = time.monotonic()
    ranks.close()
    assert time.monotonic() - started_s < 1.8, "they share the time to end"
    assert_gone(ranks.pids)


_LEADER = """
import time, torch
from session_server.parallel.ranks import Ranks
print(*Ranks(2, torch.device("cpu")).pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_ranks_end_with_rank_0_whatever_ends_it(*, is_stopped: bool) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", _LEADER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert leader.stdout is not None
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == 1
    if is_stopped:
        os.kill(pids[0], signal.SIGSTOP)
    leader.kill()
    leader.communicate()
    assert_gone(pids)
