"""A server for streaming sessions with large language models."""
