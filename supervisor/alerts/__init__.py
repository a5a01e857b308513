"""Send alerts: a sidecar that follows the daemon's events and applies the rules of [[alerts]].

`rules`, `changes` and `kinds` are pure: they decide which message is sent, and when. `process`
follows the daemon's events, `couriers` delivers each message by a process of its own.

May import: api, ipc.resilience, ipc.secrets, ipc.watching, ipc.wire, processes, system.
Not for: reading [[alerts]] from the configuration (config/alerts.py).
"""
