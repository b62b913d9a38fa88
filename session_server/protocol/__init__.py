"""Implement the wire protocols without sockets: convert client messages to commands, and events to
frames."""
