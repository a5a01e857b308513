"""Decide about tasks: intake, leases, endings, retries, keys, schedules, waits.

Each module is one decision and opens with its theory.

May import: core.disk_queue, core.model, ipc.resilience, ipc.wire.
Not for: the life of workers (core/workers), the order of the queue (core/model/queue.py).
"""
