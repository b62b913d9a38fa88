"""One number says how long a context may become, wherever it is asked for."""

from __future__ import annotations

from tests.web.serving import Served, served, turn


@served()
async def test_every_surface_tells_the_context_that_the_engine_serves(this: Served) -> None:
    async def told() -> set[int]:
        async with this.socket() as wire:
            numbers = {wire.hello["limits"]["max_context"]}
        models = (await this.http.get("/v1/models")).json()["data"]
        numbers |= {model["max_model_len"] for model in models}
        for path in ("/get_model_info", "/server_info"):
            numbers.add((await this.http.get(path)).json()["context_length"])
        return numbers

    def epoch() -> int:
        ready = this.sessions.engine_ready
        return 0 if ready is None else ready.epoch

    (most,) = await told()
    session_id = await this.open()
    fits = turn(input_ids=[7] * (most - 1), max_tokens=1)
    answer = await this.http.post(f"/v1/sessions/{session_id}/turns", json=fits)
    assert answer.json()["status"] == "completed"
    too_long = turn(input_ids=[7] * most, max_tokens=1)
    session_id = await this.open()
    answer = await this.http.post(f"/v1/sessions/{session_id}/turns", json=too_long)
    assert answer.status_code == 422
    assert f"({most - 1} tokens)" in answer.json()["error"]["message"]
    # After a restart with less memory it is what the new engine has.
    this.engine.max_turn_len = most // 2
    this.engine.die()
    this.engine.come_up()
    await this.until(lambda: epoch() == 2)
    assert await told() == {most // 2}
