"""The sockets: HTTP and WebSocket over the sans-IO protocols, and the only importer of FastAPI."""
