"""Run a worker process: open the worker, run its leases, be interrupted, end.

`run` is the worker's life, `mailbox` its side of workers.sock, `interrupts` lets signals reach a
handler's code only, `concurrent` runs several tasks at once.

May import: ipc.errors, ipc.secrets, ipc.user_code, ipc.watching, ipc.wire,
workers.authoring, workers.metrics.
Not for: the tools of authors of workers (workers/authoring).
"""
