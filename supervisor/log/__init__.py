"""Write the log: records and their formats, the writer thread, workers' output.

`log` has every event with its text, `formats` makes lines, JSON or journal entries, `writer` keeps
slow sinks away from the loop, `worker_output` reads the output of workers.

May import: core.model, ipc.user_code, ipc.wire, text.
Not for: deciding what happened (core reports it).
"""
