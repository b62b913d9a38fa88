"""Describe a checkpoint and the memory that serving it needs."""
