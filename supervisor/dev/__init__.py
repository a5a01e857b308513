"""Help people write workers: `musterd new` makes a project, `musterd dev` runs one and reloads it.

`musterd dev` is a process beside the daemon. It drives the daemon as a person would: by its command
line, its signals and control.sock. So nothing in the daemon knows of it.

May import: api, config, ctl, ipc.errors, ipc.wire, system, text, web.
Not for: anything the daemon uses.
"""
