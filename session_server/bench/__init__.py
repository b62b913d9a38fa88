"""`session-server bench`: speed as figures, each a ratio against ourselves or a peer in one run."""
