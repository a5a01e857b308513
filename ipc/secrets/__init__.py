"""Handle secrets: references, who may use which, where values are, how they may look.

`forms` finds a value in text however it was encoded; `names` tells sensitive names from others.

May import: ipc.wire.
Not for: storing values: they are looked up in the worker, right before a handler runs.
"""
