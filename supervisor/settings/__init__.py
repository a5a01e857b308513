"""Turn the configuration into what each part is told: policies and settings.

`policy` makes the core's policy; `sidecars` and `worker_environment` make the settings of
processes; `diff` says what a reload would change.

May import: alerts, config, core.model, ipc.client, ipc.errors, ipc.resilience, ipc.secrets,
ipc.watching, ipc.wire, processes, sockets, system.
Not for: reading files (config).
"""
