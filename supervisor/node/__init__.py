"""Run the cluster sidecar of a node: clients on one side, the supervisor on another, the engine.

`process` is the loop around two pure parts (cluster/gateway.py, cluster/claimer.py), `engines` the
threads that call PostgreSQL, `serving` what clients send and get, `lookups` the results that they
are owed. `direct` serves one program without a node: Client("postgresql://…").

May import: cluster, config, core.model, core.tasks, ipc.errors, ipc.secrets, ipc.wire, settings,
sockets, system.
Not for: decisions about tasks (cluster, core).
"""
