"""Decide everything, without I/O: `fleet.handle(now_ns, event)` returns actions.

`fleet` is the door; `reload` and `shutdown` concern all parts. Rooms below: model (the data),
disk_queue, tasks, workers.

May import: core.disk_queue, core.model, core.tasks, core.workers, ipc.resilience, ipc.wire.
Not for: anything that reads a clock, a file or a socket, or that carries actions out
(loop/perform.py).
"""
