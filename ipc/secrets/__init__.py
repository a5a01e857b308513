"""Handle secrets: references, permissions, places of values, encoded forms of values.

`forms` finds a value in text however it was encoded; `names` tells sensitive names from others.

May import: ipc.errors, ipc.wire.
Not for: storing values: the worker looks them up right before a handler runs.
"""
