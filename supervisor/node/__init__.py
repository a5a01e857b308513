"""Run the cluster sidecar of a node: clients on one side, the supervisor on another, the engine.

`process` is the loop around pure parts (cluster/splitter.py, gateway.py, claimer.py, scheduler.py),
`engines` the threads that call PostgreSQL, `serving` the clients, `lookups` the results that
clients are owed, `pairs` the connections over which clients reach the pools of this machine alone,
`finds` what people look for. `direct` serves one program without a node, Client("postgresql://…").

May import: cluster, config, core.model, core.tasks, ipc.errors, ipc.wire, settings,
sockets, system.
Not for: decisions about tasks (cluster, core).
"""
