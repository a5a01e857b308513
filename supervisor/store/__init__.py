"""Keep tasks, results and facts on disk: SQLite, group commits, two threads.

`interface` is what the loop speaks to; `sqlite` implements it, `memory` too. `task_batches` and
`result_batches` put many into a row; `requests` are questions answered later.

May import: config, core.model, ipc.errors, ipc.wire, system.
Not for: deciding what must be on disk before what is told (core/model/ledger.py).
"""
