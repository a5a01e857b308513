"""Run a worker process: open the worker, run its leases, be interrupted, end.

`run` is its life, `mailbox` its side of workers.sock, `interrupts` lets signals reach a handler and
nothing else, `concurrent` runs several tasks at once.

May import: ipc.errors, ipc.secrets, ipc.user_code, ipc.wire, workers.authoring,
workers.metrics.
Not for: what authors of workers use (workers/authoring).
"""
