"""`SideWork`: what steps ask for that is done beside the forwards: grammars and copies of KV."""

from __future__ import annotations

from collections.abc import Callable

from session_server.core.tier_orders import TierCarrier
from session_server.engine.engine import StepOutcome
from session_server.engine_host.compiling import Compile, CompileThreads
from session_server.engine_host.inbox import Inbox
from session_server.engine_host.tier_threads import TierThreads


class SideWork:
    """Pass what a step asks for to threads, and their results to the inbox; then call `wake`."""

    def __init__(
        self,
        inbox: Inbox,
        wake: Callable[[], None],
        fail: Callable[[BaseException], None],
        *,
        compile_: Compile,
        carrier: TierCarrier,
    ) -> None:
        def deliver(put: Callable[..., None], result: object) -> None:
            put(result)
            wake()

        self._compiling = CompileThreads(compile_, lambda r: deliver(inbox.put_compiled, r))
        self._tiers = TierThreads(carrier, lambda r: deliver(inbox.put_copied, r), fail)

    def submit(self, outcome: StepOutcome) -> None:
        """Queue what a step asks for. Never blocks."""
        self._compiling.submit(outcome.to_compile)
        self._tiers.submit(outcome.orders)
