"""Use Linux: system calls Python lacks, descriptors, directories, threads.

Each module wraps one part of the system.

May import: ipc.errors, ipc.wire.
Not for: anything that knows of tasks or workers.
"""
