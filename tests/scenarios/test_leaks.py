"""L: what is taken and never given back."""

from __future__ import annotations

from tests.engine.bench import Bench, Stage
from tests.mutants.in_leases import RELEASE_DROPS_TAIL, RELEASE_KEEPS_ROW
from tests.scenarios.lines import close, distinct
from tests.scenarios.registry import scenario


@scenario("L2", RELEASE_DROPS_TAIL)
def test_l2_a_turn_retracted_in_mid_decode_resumes_and_loses_no_page() -> None:
    bench = Bench(Stage(num_pages=14, chunk_tokens=64))
    old, young = bench.open("old"), bench.open("young")
    bench.run(
        bench.submit_command(old, "a", distinct(1, 17), max_tokens=30),
        bench.submit_command(young, "b", distinct(2, 18), max_tokens=20),
    )
    assert bench.finished("b").num_retractions > 0
    assert bench.finished("a").num_retractions == 0
    bench.expect("a", distinct(1, 17))
    bench.expect("b", distinct(2, 18))
    bench.close_all()


@scenario("L5", RELEASE_KEEPS_ROW)
def test_l5_a_turn_that_ends_with_its_first_forward_gives_back_row_and_pages() -> None:
    bench = Bench(Stage(num_rows=1, max_running=1))
    for i in range(5):
        session_id = bench.open(f"s{i}")
        bench.run(bench.submit_command(session_id, f"t{i}", distinct(i, 9), max_tokens=1))
        bench.expect(f"t{i}", distinct(i, 9))
        bench.run(close(f"s{i}"))
    bench.close_all()
