"""Keep the tail of long queues on disk alone, and bring it back page by page.

`queue` has the theory; `unwritten` keeps tasks on their way to disk, `tasks` turns rows into tasks,
`rules` is what tests and the simulation check.

May import: core.model, ipc.wire.
Not for: reading or writing files (store).
"""
