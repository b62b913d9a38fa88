"""What replicas say to each other about prompts, and how they know that it is a replica."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections import OrderedDict
from typing import Annotated, Final

import msgspec

PATH: Final = "/v1/internal/prefill"
"""Where a replica is asked to compute a prompt."""

FRESH_S: Final = 30.0
"""Seconds by which the time in a request may differ from the store's clock."""

MAX_SEEN: Final = 1 << 14
"""Requests that are remembered, so that none counts twice; of more the oldest are refused."""

_MAC_BYTES: Final = 32
_TIME_BYTES: Final = 8
_PURPOSE: Final = b"prefill request"


class Forged(Exception):
    """Report a request that no replica of this store has made now, or that was made before."""


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Ask for the KV of whole pages of a context.

    Attributes:
        model: the fingerprint of the model's text side; another model answers `misfit`.
        page_size: tokens of a page.
        owner_id, session: whose it is: the salts of the cache follow from them.
        weight: see `OpenSession.tenant_weight`.
        tokens: int32 [n], little-endian, whole pages.
        cut: see `WriteKV`.
    """

    model: bytes
    page_size: int
    owner_id: str
    session: str
    weight: int
    tokens: bytes
    cut: int = 0


Amount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""What an answer counts. It is not sealed: whoever gets in between may say anything."""


class PrefillWorking(msgspec.Struct, frozen=True, tag="working"):
    """Say once in a while that a prompt waits, or that `computed` tokens of it are there."""

    computed: Amount = 0


class PrefillWritten(msgspec.Struct, frozen=True, tag="written"):
    """Say that the first `num_tokens` are on disk, in these files: id and bytes of each."""

    num_tokens: Amount
    files: tuple[tuple[bytes, Amount], ...]


class PrefillRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Say that a prompt is not computed, or could not be: `busy`, `misfit` or `failed`."""

    why: str
    message: str = ""


News = PrefillWorking | PrefillWritten | PrefillRefused
"""One line of an answer. The last one is no `PrefillWorking`."""

_NEWS: Final[msgspec.json.Decoder[News]] = msgspec.json.Decoder(News)
_REQUEST: Final = msgspec.msgpack.Decoder(PrefillRequest)


def line_of(news: News) -> bytes:
    """Return news as a line of an answer."""
    return msgspec.json.encode(news) + b"\n"


def news_of(line: bytes | str) -> News:
    """Return the news of a line. Raises msgspec.MsgspecError."""
    return _NEWS.decode(line)


class Seal:
    """Seal requests with a key that all replicas of a store have, and nobody else.

    What is sealed names the replica that it is for and the time, by the store's clock. It is not
    encrypted: use URLs with https where others can listen.
    """

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, _PURPOSE, hashlib.sha256)
        self._seen: OrderedDict[bytes, float] = OrderedDict()
        self._least_s = -math.inf

    def seal(self, request: PrefillRequest, *, url: str, now_s: float) -> bytes:
        """Return a request as it is sent to the replica of a URL."""
        stamped = int(now_s * 1e3).to_bytes(_TIME_BYTES, "little") + msgspec.msgpack.encode(request)
        return self._mac(url, stamped) + stamped

    def unseal(self, sealed: bytes, *, url: str, now_s: float) -> PrefillRequest:
        """Return a request that came to the replica of a URL. Raises Forged."""
        mac, stamped = sealed[:_MAC_BYTES], sealed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(url, stamped)):
            raise Forged("the seal is wrong")
        made_s = int.from_bytes(stamped[:_TIME_BYTES], "little") / 1e3
        if abs(now_s - made_s) > FRESH_S or made_s <= self._least_s or mac in self._seen:
            raise Forged("the request was made at another time, or was seen before")
        self._note(mac, made_s, now_s)
        try:
            return _REQUEST.decode(stamped[_TIME_BYTES:])
        except msgspec.MsgspecError:
            raise Forged("another version has made the request") from None

    def _note(self, mac: bytes, made_s: float, now_s: float) -> None:
        self._seen[mac] = made_s
        while self._seen:
            oldest, made_s = next(iter(self._seen.items()))
            if now_s - made_s <= FRESH_S and len(self._seen) <= MAX_SEEN:
                return
            if now_s - made_s <= FRESH_S:
                self._least_s = max(self._least_s, made_s)
            del self._seen[oldest]

    def _mac(self, url: str, stamped: bytes) -> bytes:
        place = url.rstrip("/").encode()
        told = len(place).to_bytes(4, "little") + place + stamped
        return hmac.digest(self._key, told, hashlib.sha256)
