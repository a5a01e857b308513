"""Share a queue between machines: the engine that decides between nodes, and its PostgreSQL.

`gateway` serves clients and `claimer` the node, both pure; `splitter` before the gateway sends what
concerns pools of one machine to its supervisor. Their process is the room `node`.
`engine` is the contract; `model_engine` and `postgres` keep it, one in memory for the simulation,
one in PostgreSQL. `migrate` brings the schema there, `checks` says which server cannot be used.
A daemon without [cluster] imports nothing of this room.

May import: core.model, ipc.errors, ipc.resilience, ipc.watching, ipc.wire,
text.
Not for: what a node decides alone (core): slots, leases, timeouts, crashes of workers.
"""
