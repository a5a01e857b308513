"""Offer what people write workers with: Worker, @task, Context and what it gives.

`base` has the classes, `request_channel` is a handler's line to the supervisor, `outcome` turns
what became of an attempt into bytes, `vault` keeps secrets out of them.

May import: ipc.errors, ipc.secrets, ipc.wire, workers.metrics, workers.texts.
Not for: running handlers (workers/runtime).
"""
