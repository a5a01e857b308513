"""Show the state of the fleet: core and store in, structs of api out.

Views change nothing in core and store; `metrics` also counts the turns of the loop.

May import: api, core, core.model, core.workers, ipc.resilience, ipc.wire, log, shell, store.
Not for: deciding, or formatting for a terminal or a page (ctl, web).
"""
