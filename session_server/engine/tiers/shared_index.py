"""`SharedIndex`: what is known of the files of a directory that other servers write too."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from cache.tiers.segment import NAME_BYTES, Chain
from session_server.engine.tiers.use_clock import UseClock

ASK_AGAIN_S: Final = 10.0
"""After which a file is asked for again by a name that had none."""

MAX_ASKED: Final = 4096
"""Names that were asked for last; another one is asked for at once."""


class SharedIndex:
    """Stand in for `UnreadFiles`: any name may be that of a file, except those that were asked for
    lately. No file is counted here: whoever writes keeps the directory within its bytes."""

    num_bytes = 0

    def __init__(self, uses: UseClock) -> None:
        self._uses = uses
        self._asked: OrderedDict[Chain, float] = OrderedDict()

    def __len__(self) -> int:
        return 0

    def __contains__(self, name: Chain) -> bool:
        asked_s = self._asked.get(name)
        return asked_s is None or self._uses.now_s >= asked_s + ASK_AGAIN_S

    def num_of(self, tag: bytes) -> int:
        """Return no file."""
        return 0

    def size_of(self, name: Chain) -> int | None:
        """Return nothing."""
        return None

    def oldest(self, tag: bytes) -> Chain | None:
        """Return nothing: what gives way is found by looking at the directory."""
        return None

    def pop(self, name: Chain) -> bytes | None:
        """Note that a name was asked for; return nothing, for the file to stay."""
        self._asked.pop(name, None)
        self._asked[name] = self._uses.now_s
        if len(self._asked) > MAX_ASKED:
            self._asked.popitem(last=False)
        return None

    def expect(self, file_id: bytes, _num_bytes: int) -> None:
        """Note that a file is there, though there may have been none a moment ago."""
        self._asked.pop(file_id[:NAME_BYTES], None)

    def clear(self) -> list[dict[Any, Any]]:
        """Forget what was asked for."""
        self._asked.clear()
        return []

    def has_after(self, chain: Chain) -> bool:
        """Return no: whoever removes files looks at what follows them."""
        return False
