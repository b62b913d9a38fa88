"""What one key of a server holds, for another key to ask for."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.web.serving import Served, turn

OURS = {"authorization": "Bearer secret"}
THEIRS = {"authorization": "Bearer other"}
PUBLIC_PARAMETERS = {"name", "path", "model_id", "action"}
"""Parameters of paths that name nothing of anybody's."""

CANARY = "zq7-said-by-its-owner"


@dataclass(frozen=True)
class Holdings:
    """Ids by kind, and how they are asked for."""

    ids: dict[str, str]
    headers: dict[str, str]

    def is_told_in(self, text: str) -> bool:
        """Whether an answer says anything of what was said."""
        return CANARY in text

    async def is_whole(self, this: Served) -> bool:
        """Whether all of it is still there."""
        ids = self.ids
        for path in (
            f"/v1/sessions/{ids['session_id']}/turns/{ids['turn_id']}",
            f"/v1/responses/{ids['response_id']}",
            f"/v1/conversations/{ids['conversation_id']}/items",
        ):
            answer = await this.http.get(path, headers=self.headers)
            if answer.status_code != 200:
                return False
        items = await this.http.get(f"/v1/sessions/{ids['session_id']}/items", headers=self.headers)
        return CANARY in items.text

    def requests(self) -> Iterator[tuple[str, str, Any]]:
        """Requests of this key (method, path, body) that name something by `<kind>`; a body of
        only "?" is that of a path or query with ID."""
        own = self.ids
        session, responses = f"/v1/sessions/{own['session_id']}", "/v1/responses"
        for path in (responses, f"{responses}/input_tokens", f"{responses}/compact"):
            yield "POST", path, {"input": "x", "previous_response_id": "<response_id>"}
            yield "POST", path, {"input": [{"type": "item_reference", "id": "<message_id>"}]}
        for path in (responses, f"{responses}/input_tokens"):
            yield "POST", path, {"input": "x", "conversation": "<conversation_id>"}
            yield "POST", path, {"input": "x", "conversation": {"id": "<conversation_id>"}}
        reference = [{"type": "item_reference", "id": "<message_id>"}]
        yield "POST", "/v1/conversations", {"items": reference}
        yield "POST", f"/v1/conversations/{own['conversation_id']}/items", {"items": reference}
        yield "POST", "/close_session", {"session_id": "<session_id>"}
        yield "POST", "/abort_request", {"rid": "<rid>"}
        for params in (
            {"id": "<session_id>"},
            {"id": "<session_id>", "rid": "x"},
            {"id": own["branch_id"], "rid": "<rid>"},
        ):
            yield "POST", "/generate", {"text": "x", "session_params": params}
        yield "POST", f"{session}/fork", {"at_item": "<item_id>"}
        yield "POST", f"{session}/rewind", {"to_item": "<item_id>"}
        yield "PATCH", f"{session}/items/ID", {"content": "x", "?": "<item_id>"}
        yield "GET", f"{session}/turns/ID", {"?": "<turn_id>"}
        yield "POST", f"{session}/turns/ID/cancel", {"?": "<turn_id>"}
        yield "GET", "/v1/sessions?after=ID", {"?": "<session_id>"}
        response = f"{responses}/{own['response_id']}"
        yield "GET", f"{response}/input_items?after=ID", {"?": "<message_id>"}
        conversation = f"/v1/conversations/{own['conversation_id']}"
        yield "GET", f"{conversation}/items?after=ID", {"?": "<entry_id>"}
        for method in ("GET", "DELETE"):
            yield method, f"{conversation}/items/ID", {"?": "<entry_id>"}


async def hold(this: Served, headers: dict[str, str], *, num_turns: int = 3) -> Holdings:
    """Make one of everything that has an id. Items of a session count up: `num_turns` says how
    far."""

    async def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await this.http.post(path, json=body, headers=headers)
        assert answer.status_code in (200, 201), answer.text
        made: dict[str, Any] = answer.json()
        return made

    session_id = (await post("/v1/sessions", {"metadata": {"said": CANARY}}))["id"]
    for _ in range(num_turns):
        said = await post(f"/v1/sessions/{session_id}/turns", turn(CANARY))
    response = await post("/v1/responses", {"input": CANARY, "max_output_tokens": 2})
    items = [{"role": "user", "content": CANARY}]
    conversation = await post("/v1/conversations", {"items": items})
    entries = await this.http.get(f"/v1/conversations/{conversation['id']}/items", headers=headers)
    rid, branch_id = secrets.token_hex(16), secrets.token_hex(16)
    opened = {"capacity_of_str_len": 0, "session_id": branch_id, "streaming": False}
    await this.http.post("/open_session", json=opened, headers=headers)
    sampling = {"max_new_tokens": 2, "temperature": 0}
    generated = {"text": CANARY, "rid": rid, "sampling_params": sampling}
    await post("/generate", {**generated, "session_params": {"id": branch_id}})
    return Holdings(
        {
            "session_id": session_id,
            "turn_id": said["id"],
            "item_id": said["item"]["id"],
            "response_id": response["id"],
            "conversation_id": conversation["id"],
            "message_id": response["output"][0]["id"],
            "entry_id": entries.json()["data"][0]["id"],
            "branch_id": branch_id,
            "rid": rid,
            "name": "kvsession.v1.json",
            "path": "x",
            "model_id": "paper",
            "action": "cool",
        },
        headers,
    )


def unknown_like(ids: dict[str, str]) -> dict[str, str]:
    """Ids of the same forms and lengths that nothing has."""

    def other(text: str) -> str:
        return re.sub(r"[0-9a-f]{8,}", lambda found: secrets.token_hex(32)[: len(found[0])], text)

    made = {kind: other(text) for kind, text in ids.items()}
    made["item_id"] = re.sub(r"[0-9]", "9", ids["item_id"])  # of a session, where items count up
    return {**made, **{kind: ids[kind] for kind in PUBLIC_PARAMETERS}}
