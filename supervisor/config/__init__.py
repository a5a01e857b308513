"""Read the configuration: files, environment and command line, merged and checked.

`schema` has the keys with their kinds and defaults; pools, alerts, http and events have modules of
their own. `sources` reads values with their origins, `load`
merges them and reports all problems at once.

May import: alerts, core.model, ipc.client, ipc.errors, ipc.resilience, ipc.secrets, ipc.watching,
ipc.wire, text.
Not for: what the configuration means to the daemon (settings).
"""
