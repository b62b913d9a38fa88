"""Know what KV lies outside of the pools: in host memory and on disk."""
