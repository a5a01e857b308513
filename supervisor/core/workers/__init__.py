"""Decide about workers and sidecars: life, number, health, replacement.

`lifecycle` starts and stops workers; `sizing`, `autoscale` and `pressure` say how many; `rolling`
and `recycling` replace them; `health_checks` finds those that hang.

May import: core.model, core.tasks, ipc.resilience, ipc.wire.
Not for: forking and killing (processes).
"""
