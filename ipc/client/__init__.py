"""Connect to tasks.sock as a client: Client, AsyncClient and the code they share.

`session` is pure state, `link` runs a session on a connection, `driver` lets threads take turns at
a link, `taskspec` checks what a user writes.

May import: ipc.errors, ipc.secrets, ipc.watching, ipc.wire.
Not for: the daemon's side (supervisor/sockets/clients.py).
"""
