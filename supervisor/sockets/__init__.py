"""Serve tasks.sock, workers.sock and node.sock, and own the files of all sockets.

`clients`, `workers` and `node` turn messages into events and actions into messages; `lookups`
fetches what clients are owed; `activation` takes sockets over from systemd.

May import: core.model, core.tasks, ipc.errors, ipc.wire, log, shell, store, system, views.
Not for: control.sock's protocol (control), the wire format (ipc/wire).
"""
