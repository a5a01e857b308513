"""Run `musterd demo`: the main job on a sample site, from start to clean shutdown.

The demo drives a real daemon as a user would.

May import: api, ctl, ipc.client, ipc.errors, ipc.wire.
Not for: anything the daemon uses.
"""
