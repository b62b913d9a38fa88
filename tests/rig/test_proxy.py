"""The proxy does what it counts, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.rig.decisions import Decisions
from tests.rig.proxy import CALM, ChaosProxy, Fate, Fault, Weather

WORDS = bytes(range(256)) * 40


class Echo:
    """A server that says back what it hears, and keeps it."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        self.reads: list[int] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard = bytearray()
        self.heard.append(heard)
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65_536):
                    heard += data
                    self.reads.append(len(data))
                    writer.write(data)
                    await writer.drain()
        finally:  # a test may end before the last connection does
            writer.close()


@contextlib.asynccontextmanager
async def echoing(weather: Weather, *, seed: int = 0) -> AsyncIterator[tuple[Echo, ChaosProxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, ChaosProxy(url, weather, seed=seed) as proxy:
        yield echo, proxy


async def say(proxy: ChaosProxy, words: bytes, *, patience_s: float = 30) -> tuple[bytes, str]:
    """What comes back, and how it ends: `eof`, `reset`, or `silence`."""
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer, how = b"", "eof"
    try:
        writer.write(words)
        async with asyncio.timeout(patience_s):
            await writer.drain()
            while len(answer) < len(words) and (data := await reader.read(65_536)):
                answer += data
    except ConnectionError:
        how = "reset"
    except TimeoutError:
        how = "silence"
    if len(answer) == len(words):
        how = "all"
    writer.transport.abort()
    return answer, how


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(bounded())


def test_in_calm_weather_everything_arrives_unchanged() -> None:
    async def test() -> None:
        async with echoing(CALM) as (echo, proxy):
            assert await say(proxy, WORDS) == (WORDS, "all")
            assert bytes(echo.heard[0]) == WORDS
            trouble = set(proxy.did) - {"connections", "bytes_up", "bytes_down"}
            assert not trouble

    run(test)


def test_splitting_and_stalling_change_no_byte() -> None:
    async def test() -> None:
        weather = Weather(fault=0, repeat=0, split=1, stall=1, longest_stall_s=0.01, max_offset=64)
        async with echoing(weather) as (echo, proxy):
            for _ in range(8):
                assert await say(proxy, WORDS) == (WORDS, "all")
            assert all(bytes(heard) == WORDS for heard in echo.heard)
            assert sum(size <= 3 for size in echo.reads) > 32, "by ones and twos"
            assert proxy.did["split"] >= 8
            assert proxy.did["stall"] >= 1

    run(test)


@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        # Closing with words unread resets whoever said them.
        (Fault.CUT, {"eof", "reset"}),
        (Fault.RESET, {"reset"}),
        (Fault.HALF_CLOSE, {"eof", "reset"}),
        (Fault.BLACKHOLE, {"silence"}),
    ],
)
def test_a_fault_strikes_at_its_byte_and_nothing_passes_it(fault: Fault, ends: set[str]) -> None:
    async def test() -> None:
        weather = Weather(fault=1, stall=0, split=0, repeat=0, faults=(fault,), max_offset=2000)
        async with echoing(weather, seed=5) as (echo, proxy):
            for number in range(1, 9):
                patience_s = 0.1 if fault is Fault.BLACKHOLE else 30
                answer, how = await say(proxy, WORDS, patience_s=patience_s)
                planned = Fate.of(weather, 5, number).fault
                assert planned is not None
                _, direction, offset = planned
                assert how in ends, (planned, how)
                passed = bytes(echo.heard[-1]) if direction == "up" else answer
                assert len(passed) <= offset
                assert WORDS.startswith(passed)
            assert proxy.did[fault.value] == 8

    run(test)


def test_half_a_connection_goes_on_when_the_other_half_is_closed() -> None:
    async def test() -> None:
        weather = Weather(
            fault=1, stall=0, split=0, repeat=0, faults=(Fault.HALF_CLOSE,), max_offset=2000
        )
        async with echoing(weather, seed=5) as (_, proxy):
            for number in range(1, 9):
                answer, _ = await say(proxy, WORDS)
                planned = Fate.of(weather, 5, number).fault
                assert planned is not None
                if planned[1] == "up":
                    assert answer == WORDS[: planned[2]], "what was heard before is answered"

    run(test)


def test_what_was_said_is_said_again_on_a_connection_of_its_own() -> None:
    async def test() -> None:
        weather = Weather(fault=0, stall=0, split=0, repeat=1, blackhole_s=0.1)
        async with echoing(weather) as (echo, proxy):
            assert await say(proxy, b"turn this once") == (b"turn this once", "all")
            while proxy.num_open:
                await asyncio.sleep(0.01)
            assert [bytes(heard) for heard in echo.heard] == [b"turn this once"] * 2
            assert proxy.did["repeated"] == 1

    run(test)


def test_fates_depend_on_seed_and_number_alone_and_are_as_frequent_as_said() -> None:
    weather = Weather(fault=0.5, stall=0.25, repeat=0.1)
    fates = [Fate.of(weather, 1, number) for number in range(4000)]
    assert fates == [Fate.of(weather, 1, number) for number in range(4000)]
    assert fates != [Fate.of(weather, 2, number) for number in range(4000)]
    faults = [fate.fault for fate in fates if fate.fault is not None]
    assert 0.45 < len(faults) / len(fates) < 0.55
    assert 0.2 < sum(fate.stall is not None for fate in fates) / len(fates) < 0.3
    assert 0.07 < sum(fate.is_repeated for fate in fates) / len(fates) < 0.13
    kinds = Counter((fault, direction) for fault, direction, _ in faults)
    assert len(kinds) == 8
    assert min(kinds.values()) > 150
    offsets = {offset for _, _, offset in faults}
    assert {0, 1, 2} <= offsets
    assert max(offsets) > 7000


def test_decisions_of_one_name_do_not_depend_on_those_of_another() -> None:
    one, two = Decisions(1, "a"), Decisions(1, "a")
    Decisions(1, "b").share()
    assert [one.share() for _ in range(5)] == [two.share() for _ in range(5)]
    assert {Decisions(1, "x").between(3, 5) for _ in range(1)} <= {3, 4, 5}
