"""Running models under the profiler with anti-patterns injected; imports nothing, as help pages read it."""

EVENT_CAP = 60_000
"""A trace with more events is cut to fewer steps, unless told otherwise."""

TIME_LIMIT = 600.0
"""Seconds that a workload may take, unless told otherwise."""

CHECK_TIME_LIMIT = 300.0
"""Seconds that `traceap zoo check` gives a model, unless told otherwise."""

SHARD_MB = 45.0
"""Megabytes of a file of traces at most, unless told otherwise: hosts of Git take no more than 50."""
