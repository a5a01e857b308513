"""Be a client of tasks.sock: Client, AsyncClient and what they share.

`session` is pure state, `link` a session on a connection, `driver` lets threads take turns at it;
`taskspec` checks what a user writes.

May import: ipc.errors, ipc.secrets, ipc.wire.
Not for: the daemon's side (supervisor/sockets/clients.py).
"""
