"""Manage sessions: token history, turns in order, journal, expiry.

The token history is the source of truth and lives here; the engine's KV is a cache of it. This
package does not know sockets: `web` reads journals, `protocol` converts their entries to frames.
"""
