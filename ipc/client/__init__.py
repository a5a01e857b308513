"""Connect to tasks.sock as a client: Client, AsyncClient and the code they share.

`session` is pure state, `link` runs a session on a connection, `driver` lets threads take turns at
a link, `taskspec` checks what a user writes, `calls` typed calls. Of workers.authoring, nothing but
the type of a handler's `ctx` is known here, and that to type checkers alone.

May import: ipc.errors, ipc.secrets, ipc.signatures, ipc.watching, ipc.wire,
workers.authoring.
Not for: the daemon's side (supervisor/sockets/clients.py).
"""
