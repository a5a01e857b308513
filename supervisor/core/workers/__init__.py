"""Decide about workers: their life, number, health, replacement, and the sidecars'.

`lifecycle` starts and stops, `sizing`, `autoscale` and `pressure` say how many, `rolling` and
`recycling` replace, `health_checks` finds those that hang.

May import: core.model, core.tasks, ipc.resilience, ipc.wire.
Not for: forking and killing (processes).
"""
