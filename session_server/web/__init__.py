"""Serve HTTP and WebSockets over the sans-IO protocols; the only package that imports FastAPI."""
