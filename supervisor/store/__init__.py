"""Keep tasks, results and facts on disk: SQLite, group commits, three threads.

`interface` is what the loop calls; `sqlite` and `memory` implement it, `engines` opens one of them.
`task_batches` and `result_batches` put many tasks into a row; `requests` are answered later.

May import: config, core.model, ipc.errors, ipc.wire, system.
Not for: deciding what must be on disk before what is told (core/model/ledger.py).
"""
