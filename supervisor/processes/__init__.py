"""Make, contain, watch and end processes: fork servers, workers, sidecars, clean-ups.

`spawner` is the entrance. `forkserver` and `init` run in processes of their own; `registry` knows
every process; `orphans`, `previous_run` and `tempdirs` make sure that nothing is left behind.

May import: core.model, ipc.errors, ipc.user_code, ipc.wire, log, system.
Not for: deciding when a process starts or ends (core/workers).
"""
