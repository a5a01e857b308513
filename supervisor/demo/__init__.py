"""Run `musterd demo`: the main job on a sample site, from start to clean shutdown.

The demo drives a real daemon as a user would. `cluster` drives three of them and a PostgreSQL
(`make demo-cluster`).

May import: api, cluster, config, ctl, ipc.client, ipc.errors, ipc.wire, system.
Not for: anything the daemon uses.
"""
