"""Run several servers as one: replicas under Ray Serve, which starts, watches and routes to them.

A replica is a whole server, made from the same settings as `serve` makes one, with an engine of its
own. Ray is the extra `ray`; only `router`, `replica` and `ray_cluster` import it, and they are
imported where a cluster is asked for.
"""
