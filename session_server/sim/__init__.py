"""A deterministic simulator of the whole server: real engine, cache, protocol and sessions.

Only the device is fake (`device`), and time. A seed decides everything; what a seed finds can be
replayed and is shrunk to the operations that matter. `session-server sim` runs it.
"""

from session_server.sim.failure import SimFailure
from session_server.sim.simulation import Report, run

__all__ = ["Report", "SimFailure", "run"]
