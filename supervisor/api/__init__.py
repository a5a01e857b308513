"""Define what is spoken on control.sock: methods, parameters, answers, as typed structs.

Shared by control (answers), ctl and web (ask). A new field or method begins here.

May import: ipc.client, ipc.errors, ipc.resilience, ipc.secrets, ipc.wire.
Not for: carrying anything out (control), or reading the state of the fleet (views).
"""
