"""Which prompts are sent to a prefill replica, to which one, and how it is known who asks."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from session_server.sessions.roles import messages as messages_module
from session_server.sessions.roles.messages import (
    FRESH_S,
    Forged,
    PrefillRefused,
    PrefillRequest,
    PrefillWorking,
    PrefillWritten,
    Seal,
    line_of,
    news_of,
)
from session_server.sessions.roles.policy import (
    BUSY_S,
    FAILED_S,
    MAX_PROMPT_TOKENS,
    MAX_SENT,
    MAX_SENT_TOKENS,
    MIN_SENT_TOKENS,
    Need,
    Outcome,
    Peer,
    PeerBook,
    is_long,
)

PAGE = 16
PEERS = [Peer(number, f"http://replica-{number}") for number in range(1, 5)]
URL, NOW_S = "http://prefill:30000", 1e9
REQUEST = PrefillRequest(
    model=b"m", page_size=PAGE, owner_id="name:o", session="s", weight=1000, tokens=b"\1\0\0\0" * 16
)


@pytest.mark.parametrize(
    ("context_len", "held_len", "expected"),
    [
        (MIN_SENT_TOKENS + 1, 0, True),
        (MIN_SENT_TOKENS, 0, False),  # a token at least is computed here, and whole pages are sent
        (2 * MIN_SENT_TOKENS + 1, MIN_SENT_TOKENS, True),
        (4 * MIN_SENT_TOKENS + 1, 2 * MIN_SENT_TOKENS + 1, False),  # most of it is here
        (2 * MIN_SENT_TOKENS + 1, 2 * MIN_SENT_TOKENS, False),
        (MAX_PROMPT_TOKENS + 1, 0, True),
        (MAX_PROMPT_TOKENS + PAGE + 1, 0, False),  # no request holds it
    ],
)
def test_long_and_new_prompts_are_sent(context_len: int, held_len: int, expected: bool) -> None:
    assert is_long(Need(context_len, held_len, PAGE)) is expected


def test_what_is_sent_ends_with_a_page_and_leaves_a_token() -> None:
    for context_len in range(1, 4 * PAGE):
        sent_len = Need(context_len, 0, PAGE).sent_len
        assert sent_len % PAGE == 0
        assert 1 <= context_len - sent_len <= PAGE


def test_a_session_goes_to_one_replica_and_sessions_to_all() -> None:
    book = PeerBook()
    chosen = Counter(book.choose(PEERS, f"s{i}", 0.0) for i in range(400))
    assert min(chosen.values()) > 50, chosen
    assert set(chosen) == set(PEERS)
    homes = {f"s{i}": book.choose(PEERS, f"s{i}", 0.0) for i in range(400)}
    without = [each for each in PEERS if each.replica_id != 3]
    for session, home in homes.items():
        if home != PEERS[2]:
            assert book.choose(without, session, 0.0) == home, "others keep theirs"


def test_a_replica_with_much_to_do_is_spared() -> None:
    book = PeerBook()
    home = book.choose(PEERS, "s", 0.0)
    assert home is not None
    for _ in range(2):
        book.begin(home, 100)
    assert book.choose(PEERS, "s", 0.0) != home
    book.end(home, 100, "done", 0.0)
    assert book.choose(PEERS, "s", 0.0) == home


@pytest.mark.parametrize(("outcome", "pause_s"), [("busy", BUSY_S), ("failed", FAILED_S)])
def test_who_has_refused_is_not_asked_for_a_while(outcome: Outcome, pause_s: float) -> None:
    book, only = PeerBook(), PEERS[:1]
    book.begin(only[0], 10)
    book.end(only[0], 10, outcome, 5.0)
    assert book.choose(only, "s", 5.0 + pause_s - 0.01) is None
    assert book.choose(only, "s", 5.0 + pause_s) == only[0]
    assert book.choose([], "s", 5.0) is None
    assert not book._not_before_s, "of replicas that are gone nothing is kept"


def test_no_more_is_sent_than_there_may_be() -> None:
    book = PeerBook()
    for _ in range(MAX_SENT):
        assert book.may_send(1)
        book.begin(PEERS[0], 1)
    assert not book.may_send(1)
    book = PeerBook()
    assert book.may_send(MAX_SENT_TOKENS)
    book.begin(PEERS[0], MAX_SENT_TOKENS)
    assert not book.may_send(1)
    book.end(PEERS[0], MAX_SENT_TOKENS, "failed", 0.0)
    assert (book.num_tokens, book.may_send(1)) == (0, True)


def test_a_request_counts_once_now_and_at_its_replica() -> None:
    secret = os.urandom(32)
    sealed = Seal(secret).seal(REQUEST, url=URL, now_s=NOW_S)
    for url, now_s, key in (
        ("http://another:30000", NOW_S, secret),
        (URL, NOW_S + FRESH_S + 1, secret),
        (URL, NOW_S - FRESH_S - 1, secret),
        (URL, NOW_S, os.urandom(32)),
    ):
        with pytest.raises(Forged):
            Seal(key).unseal(sealed, url=url, now_s=now_s)
    seal = Seal(secret)
    assert seal.unseal(sealed, url=f"{URL}/", now_s=NOW_S + 1) == REQUEST
    with pytest.raises(Forged, match="seen before"):
        seal.unseal(sealed, url=URL, now_s=NOW_S + 2)


def test_any_changed_byte_is_found() -> None:
    seal = Seal(b"0" * 32)
    sealed = seal.seal(REQUEST, url=URL, now_s=NOW_S)
    for place in range(len(sealed)):
        spoiled = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
        with pytest.raises(Forged):
            seal.unseal(spoiled, url=URL, now_s=NOW_S)
    for short in (b"", sealed[:31], sealed[:39]):
        with pytest.raises(Forged):
            seal.unseal(short, url=URL, now_s=NOW_S)


def test_what_is_remembered_has_a_bound_and_nothing_forgotten_counts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages_module, "MAX_SEEN", 8)
    seal = Seal(b"0" * 32)
    all_sealed = [seal.seal(REQUEST, url=URL, now_s=NOW_S + i / 100) for i in range(20)]
    for sealed in all_sealed:
        seal.unseal(sealed, url=URL, now_s=NOW_S + 1)
    assert len(seal._seen) == 8
    for sealed in all_sealed:
        with pytest.raises(Forged):
            seal.unseal(sealed, url=URL, now_s=NOW_S + 1)
    seal.unseal(seal.seal(REQUEST, url=URL, now_s=NOW_S + 90), url=URL, now_s=NOW_S + 90)
    assert len(seal._seen) == 1, "what is too old is refused by its time"


@pytest.mark.parametrize(
    "news",
    [
        PrefillWorking(7),
        PrefillWritten(32, ((b"\0\xff", 4096),)),
        PrefillRefused("busy", "much to do"),
    ],
)
def test_news_are_lines(news: PrefillWorking | PrefillWritten | PrefillRefused) -> None:
    line = line_of(news)
    assert line.count(b"\n") == 1
    assert news_of(line) == news
