"""Wire protocols without sockets: what clients send becomes commands, what happens frames."""
