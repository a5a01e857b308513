"""Look at results: which part is watched, numbers as people write them, what differs, in words.

`view` runs in the worker, on each result of a schedule with `notify`; `numbers` reads prices;
`difference` compares two results and runs wherever they are shown.

May import: ipc.errors, ipc.wire.
Not for: the decision whether it is a change (supervisor/core/model/watching.py).
"""
