"""Turn the configuration into what each part is told: policies and settings.

`policy` makes the core's policy, the others the settings of sidecars and workers; `diff` says what
a reload would change.

May import: alerts, config, core.model, ipc.client, ipc.resilience, ipc.secrets, ipc.wire,
processes, sockets, system.
Not for: reading files (config).
"""
