"""Define the methods of control.sock, their parameters and answers, as typed structs.

Shared by control, which answers, and ctl and web, which ask. A new field or method begins here.

May import: ipc.client, ipc.errors, ipc.resilience, ipc.secrets, ipc.watching,
ipc.wire.
Not for: carrying anything out (control), or reading the state of the fleet (views).
"""
