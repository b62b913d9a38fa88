"""Compare API keys as digests; each has the owner whose sessions it opens.

The keys of a ring can be replaced while it is used. Whether any key is needed never changes.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final
from weakref import WeakValueDictionary

from session_server.core.errors import Unauthorized
from session_server.core.owner import ANONYMOUS, KEY_VARIABLE, NO_LIMITS, Owner, TenantLimits
from session_server.sessions.budget import RESERVED_PART
from session_server.web.key_file import (
    MAX_KEY_CHARS,
    Grant,
    digest_in,
    digest_of,
    grants_of,
    read_file,
)

SHARE_OF_MANY: Final = 0.5
"""Share of all sessions, turns and bytes that one owner may hold if there are several."""

_Buckets = dict[str, list[tuple[str, Owner]]]


@dataclass(frozen=True, slots=True)
class Credential:
    """Hold what a caller has shown: whose it is, and the digest of the key; None on an open
    server."""

    owner: Owner
    digest: str | None


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Describe how the keys of a ring are to change.

    `new_owners`: those that nobody has held before. `granted`: owners that stay, each with what it
    is granted from then on. `gone`: digests that are no keys any more, or another owner's.
    `gone_owners`: those whose last key goes. `num_admins`: of all owners.
    """

    buckets: _Buckets
    owners: dict[str, Owner]
    new_owners: tuple[Owner, ...]
    granted: tuple[tuple[Owner, Owner], ...]
    gone: tuple[str, ...]
    gone_owners: tuple[Owner, ...]
    num_admins: int


class KeyRing:
    """Map API keys to their owners. Without keys the server is open to everybody.

    Only digests are kept. A key belongs to one `Owner`, which holds its share and priority.
    """

    def __init__(
        self,
        owners: Mapping[str, Owner] = MappingProxyType({}),
        *,
        anonymous: Owner = ANONYMOUS,
        sources: KeySources | None = None,
    ) -> None:
        """Take `owners` by the digest of their key, and the owner of callers without keys."""
        self._anonymous = anonymous
        self.sources = sources
        self.is_open: Final = not owners
        """Whether no key is required. A ring whose keys are all taken back stays closed."""

        self._buckets = _buckets_of(owners)
        self._owners = {owner.owner_id: owner for owner in owners.values()}
        self._known = WeakValueDictionary(self._owners)
        """Owners that somebody holds: sessions outlive the keys that opened them."""

    @classmethod
    def of(cls, *keys: str) -> KeyRing:
        """Return a key ring of unnamed keys: each has an owner of its own."""
        return KeySources(frozenset(map(digest_of, keys))).ring()

    def change_to(self, owners: Mapping[str, Owner]) -> KeyChange:
        """Return what changes if these are the keys. Changes nothing, on any thread."""
        kept: dict[str, Owner] = {}
        new, granted, num_admins = [], [], 0
        for owner in owners.values():
            if owner.owner_id not in kept:
                known = kept[owner.owner_id] = self._known.get(owner.owner_id, owner)
                num_admins += owner.is_admin
                if known is owner:
                    new.append(owner)
                elif not known.is_granted(owner):
                    granted.append((known, owner))
        before = [pair for bucket in self._buckets.values() for pair in bucket]
        return KeyChange(
            buckets=_buckets_of({key: kept[owner.owner_id] for key, owner in owners.items()}),
            owners=kept,
            new_owners=tuple(new),
            granted=tuple(granted),
            gone=tuple(digest for digest, owner in before if owners.get(digest) != owner),
            gone_owners=tuple(o for o in self._owners.values() if o.owner_id not in kept),
            num_admins=num_admins,
        )

    def apply(self, change: KeyChange) -> None:
        """Let the keys of a change in, and no others, from now on.

        Whoever holds an `Owner` that stays finds it changed to what its keys are granted now. Takes
        as long as there are owners that are new or are granted something else.
        """
        assert not self.is_open, "an open server has no keys to replace"
        for owner, granted in change.granted:
            owner.follow(granted)
        self._buckets, self._owners = change.buckets, change.owners
        for owner in change.new_owners:
            self._known[owner.owner_id] = owner

    def credential_of(self, key: str | None) -> Credential:
        """Return what a key stands for.

        Raises:
            Unauthorized: keys are required, and this is not one of them.
        """
        if self.is_open:
            return Credential(self._anonymous, None)
        if key is not None and len(key) <= MAX_KEY_CHARS:
            digest = digest_of(key)
            if (owner := self._owner_by(digest)) is not None:
                return Credential(owner, digest)
        raise Unauthorized("A valid API key is required: Authorization: Bearer <key>.")

    def has(self, credential: Credential) -> bool:
        """Return whether a key that was shown before is one still, of the same owner."""
        if credential.digest is None:
            return self.is_open
        return self._owner_by(credential.digest) == credential.owner

    def has_owner(self, owner: Owner) -> bool:
        """Return whether any key belongs to this owner."""
        return self.is_open or owner.owner_id in self._owners

    def owner_of(self, owner_id: str) -> Owner:
        """Return the owner of an id, with what it is granted now; one without a key is granted
        nothing beyond the rest."""
        if owner_id == self._anonymous.owner_id:
            return self._anonymous
        return self._owners.get(owner_id) or self._known.get(owner_id) or Owner(owner_id)

    def _owner_by(self, digest: str) -> Owner | None:
        # Buckets are chosen by a hash, so the time this takes reveals nothing about a key.
        for known, owner in self._buckets.get(_bucket_of(digest), ()):
            if hmac.compare_digest(digest, known):
                return owner
        return None


@dataclass(slots=True)
class KeySources:
    """Hold where keys come from: the digests of fixed ones, and a file, which is read repeatedly.

    `max_priority`: the highest priority of keys whose line sets none, and of callers without keys.
    `limits`: those of keys whose line sets none, and of callers without keys.

    With a file only `admin=1` makes an admin. Without one nobody can say so: whoever has a fixed
    key is an admin.
    """

    fixed: frozenset[str] = frozenset()
    path: Path | None = None
    max_priority: int = 0
    limits: TenantLimits = NO_LIMITS

    def ring(self) -> KeyRing:
        """Return the ring of all keys. Raises InvalidKeys."""
        anonymous = replace(ANONYMOUS, max_priority=self.max_priority, limits=self.limits)
        text = "" if self.path is None else read_file(self.path)
        return KeyRing(self.owners(text), anonymous=anonymous, sources=self)

    def owners(self, text: str, *, may_be_none: bool = False) -> dict[str, Owner]:
        """Return the owner of each key, where the file says `text`; `may_be_none` as for
        `grants_of`. Raises InvalidKeys."""
        grants = {digest: Grant(digest) for digest in self.fixed}
        if self.path is not None:
            grants |= grants_of(text, str(self.path), may_be_none=may_be_none)
        is_alone = len({grant.owner_id for grant in grants.values()}) == 1
        # Several owners leave the reserve of each other alone, whatever share a line sets.
        default, most = (1.0, 1.0) if is_alone else (SHARE_OF_MANY, 1.0 - RESERVED_PART)
        return {
            digest: Owner(
                grant.owner_id,
                max_priority=grant.max_priority_or(self.max_priority),
                share=min(grant.share or default, most),
                is_admin=grant.is_admin or self.path is None,
                sees_metrics=grant.sees_metrics or grant.is_admin or self.path is None,
                limits=grant.limits.or_else(self.limits),
            )
            for digest, grant in grants.items()
        }


def key_sources(
    *,
    given: str | None,
    environment: str | None,
    path: Path | None,
    max_priority: int = 0,
    limits: TenantLimits = NO_LIMITS,
) -> KeySources:
    """Return where keys come from: the command line, the environment, a file.

    Raises:
        InvalidKeys: the key of the command line or the environment is empty or malformed.
    """
    named = ((given, "--api-key"), (environment, KEY_VARIABLE))
    fixed = frozenset(digest_in(key, where) for key, where in named if key is not None)
    return KeySources(fixed, path, max_priority, limits)


def _buckets_of(owners: Mapping[str, Owner]) -> _Buckets:
    buckets: _Buckets = {}
    for digest, owner in owners.items():
        buckets.setdefault(_bucket_of(digest), []).append((digest, owner))
    return buckets


def _bucket_of(digest: str) -> str:
    return digest[:8]
