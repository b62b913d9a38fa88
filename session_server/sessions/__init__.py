"""Sessions as their owners see them: token history, turns in order, journal, life time.

The history of tokens is the truth and lives here; the engine's KV is a cache of it. This package
knows nothing of sockets: `web` reads journals, `protocol` gives their entries a wire form.
"""
