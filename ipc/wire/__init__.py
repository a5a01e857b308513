"""Define what crosses process borders: messages, codec, ZMTP, sockets, scoreboard.

`messages` has every message of tasks.sock and workers.sock; `zmtp` and `router` speak ZeroMQ's
protocol without libzmq.

May import: ipc.errors.
Not for: control.sock (supervisor/api).
"""
