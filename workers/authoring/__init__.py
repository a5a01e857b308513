"""Offer the tools that people write workers with: Worker, @task and Context.

`base` has the classes, `request_channel` is a handler's line to the supervisor, `outcome` encodes
the result or failure of an attempt, `vault` keeps secrets out of both.

May import: ipc.errors, ipc.secrets, ipc.signatures, ipc.wire, workers.metrics,
workers.texts.
Not for: running handlers (workers/runtime).
"""
