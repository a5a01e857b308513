"""Make, contain, watch and end processes: fork servers, workers, sidecars, clean-ups.

`spawner` is the door. `forkserver` and `init` run in processes of their own; `registry` knows all
that were made; `orphans`, `previous_run` and `tempdirs` see that nothing is left behind.

May import: core.model, ipc.errors, ipc.user_code, ipc.wire, log, system.
Not for: deciding when a process starts or ends (core/workers).
"""
