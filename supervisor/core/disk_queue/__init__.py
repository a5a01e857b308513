"""Keep the tail of long queues on disk alone, and bring it back page by page.

`queue` has the theory; `unwritten` keeps tasks on their way to disk.

May import: core.model, ipc.wire.
Not for: reading or writing files (store).
"""
