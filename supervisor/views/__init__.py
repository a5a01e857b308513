"""Show the state of the fleet: core and store in, structs of api out.

Views change nothing in core and store; `metrics` also counts the turns of the loop.

May import: api, core, core.model, core.tasks, core.workers, ipc.resilience, ipc.watching,
ipc.wire, log, shell, store, text.
Not for: deciding, or formatting for a terminal or a page (ctl, web).
"""
