"""Decide what KV is copied out of the pools, where it is kept, and when it comes back."""
