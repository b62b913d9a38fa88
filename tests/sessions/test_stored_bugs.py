"""What machines have found in the store of sessions, as the steps they found it with."""

from __future__ import annotations

from tests.sessions.test_stored_machine import StoredMachine


def test_a_session_that_is_closed_while_another_expires_is_given_back_once() -> None:
    """Both were found to have expired; while the tokens of one were read, the other was closed."""
    machine = StoredMachine()
    question = {"change": "a question", "ignore_eos": True, "max_tokens": 0}
    steps = (
        machine.begin,
        lambda: machine.open(ttl_s=1000.0),
        lambda: machine.open(ttl_s=20.0),
        lambda: machine.close(chance=0, index=0),
        lambda: machine.submit_whole(**question, index=2, place=7),
        lambda: machine.unload_and_expire(chance=0),
        lambda: machine.open(ttl_s=20.0),
        lambda: machine.wait(seconds=15.0),
        lambda: machine.crash(chance=0),
        lambda: machine.die_under_a_turn(chance=0, index=0, times=4),
        machine.come_up,
        lambda: machine.wait(seconds=15.0),
        lambda: machine.close(chance=0, index=0),
        lambda: machine.submit_whole(**question, index=2, place=5),
        machine.list_all,
    )
    try:
        for step in steps:
            step()
            machine.those_on_disk_alone_are_counted()
    finally:
        machine.teardown()
