"""Run a worker process: open the worker, run its leases, be interrupted, end.

`run` is the worker's life, `mailbox` its side of workers.sock, `interrupts` lets signals reach a
handler's code only, `concurrent` runs several tasks at once, `speech` marks what tasks say,
`breakpoints` lets people debug them.

May import: ipc.errors, ipc.secrets, ipc.signatures, ipc.user_code, ipc.watching,
ipc.wire, workers.authoring, workers.metrics, workers.texts.
Not for: the tools of authors of workers (workers/authoring).
"""
