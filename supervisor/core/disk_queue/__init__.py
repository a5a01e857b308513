"""Keep the tail of long queues on disk alone, and bring it back page by page.

queue.py has the theory; `unwritten` are tasks on their way to disk, `tasks` makes tasks of what was
read, `rules` is checked by tests and the simulation.

May import: core.model, ipc.wire.
Not for: reading or writing files (store).
"""
