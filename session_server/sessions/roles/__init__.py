"""Prefill in one replica and decode in another: when to send, whom to ask, and how it is done."""
