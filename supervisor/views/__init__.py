"""Show the state of the fleet: core and store in, structs of api out.

Views read and change nothing.

May import: api, core, core.model, core.workers, ipc.resilience, ipc.wire, log, shell, store.
Not for: deciding, or formatting for a terminal or a page (ctl, web).
"""
