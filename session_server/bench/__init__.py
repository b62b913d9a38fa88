"""Measure what sessions cost: the benchmarks of `session-server bench`."""
