"""Tell people what happens: the process that sends alerts, and the rules it follows.

`rules` and `kinds` are pure: they decide who is told of what, and when. `process` follows the
daemon's events, `couriers` have each message delivered by a process of its own.

May import: api, ipc.resilience, ipc.secrets, processes, system.
Not for: what alerts are configured (config/alerts.py).
"""
