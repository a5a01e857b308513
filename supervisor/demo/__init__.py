"""Be `musterd demo`: the main job in front of the user's eyes, and a sample site.

It drives a real daemon as a user would.

May import: api, ctl, ipc.client, ipc.errors, ipc.wire.
Not for: anything that the daemon itself uses.
"""
