"""`Roles`: what a server does for others and has others do, put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from session_server.core.engine_client import EventListener
from session_server.sessions.exits import SessionExits
from session_server.sessions.roles.asking import Others, Prefills
from session_server.sessions.roles.messages import Forged, PrefillRequest, Seal
from session_server.sessions.roles.policy import Peer, Role
from session_server.sessions.roles.serving import PrefillService
from session_server.sessions.roles.transport import HttpTransport, PrefillTransport
from session_server.sessions.salts import TenantSalts
from session_server.sessions.store.session_store import SessionStore


@dataclass(frozen=True, slots=True)
class Roles:
    """Hold what a role takes. `prefills`: of one that decodes; `service`: of one that prefills,
    which answers at `url` to what is sealed by `seal`."""

    role: Role = "both"
    prefills: Prefills | None = None
    service: PrefillService | None = None
    store: SessionStore | None = None
    seal: Seal | None = None
    url: str = ""
    transport: PrefillTransport | None = None

    @property
    def observers(self) -> Sequence[EventListener]:
        """Return who is told of the engine's events."""
        return () if self.service is None else (self.service.on_event,)

    def unseal(self, sealed: bytes) -> PrefillRequest:
        """Return what another replica asks for. Raises Forged."""
        if self.seal is None or self.store is None:
            raise Forged("this server computes no prompts for others")
        return self.seal.unseal(sealed, url=self.url, now_s=self.store.clock.now_s())

    async def aclose(self) -> None:
        """Close connections to others."""
        if self.transport is not None:
            await self.transport.close()


def prefill_role(
    store: SessionStore, exits: SessionExits, salts: TenantSalts, *, model: bytes, url: str
) -> Roles:
    """Return the role of a server that computes prompts for others. `model`: see
    `PrefillRequest`."""
    is_draining = partial(getattr, exits.drain, "is_on")
    service = PrefillService(exits.parts.link, salts, model=model, is_draining=is_draining)
    return Roles("prefill", service=service, store=store, seal=Seal(store.secret), url=url)


def decode_role(
    store: SessionStore,
    exits: SessionExits,
    *,
    model: bytes,
    transport: PrefillTransport | None = None,
) -> Roles:
    """Have others compute long prompts of a server's turns from now on."""
    lease = store.lease
    assert lease is not None, "a store of this server alone"

    async def find() -> Sequence[Peer]:
        found = await lease.read(partial(lease.database.peers, "prefill"))
        return [Peer(*each) for each in found]

    transport = transport or HttpTransport()
    others = Others(
        find=find,
        transport=transport,
        seal=Seal(store.secret),
        model=model,
        wall_s=store.clock.now_s,
    )
    prefills = Prefills(exits.parts.link, others)
    exits.flow.copies.prefills = prefills
    return Roles("decode", prefills=prefills, store=store, transport=transport)
