"""More odd sockets than there are descriptors, and nobody else notices.

`make chaos` opens 1,100 of them.
"""

from __future__ import annotations

from tests.chaos.odd_sockets import ODD, run

MAX_LOG_BYTES = 10_000


def test_others_are_served_beside_odd_sockets_and_the_server_ends_in_order() -> None:
    report = run(2 * len(ODD), descriptors=160, num_rounds=1)
    assert report.problems == []
    assert report.num_served == 3
    assert report.log_bytes < MAX_LOG_BYTES
    assert report.exit_status == 0
