"""Run the cluster sidecar of a node: clients on one side, the supervisor on another, the engine.

`process` is the loop around three pure parts (cluster/gateway.py, claimer.py, scheduler.py),
`engines` the threads that call PostgreSQL, `lookups` the results that clients are owed, `finds`
what people look for.

May import: cluster, config, core.model, core.tasks, ipc.errors, ipc.wire, settings,
sockets, system.
Not for: decisions about tasks (cluster, core).
"""
