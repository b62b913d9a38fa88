"""Serve streaming sessions with large language models."""

from importlib.metadata import version

__version__ = version("session-server")
