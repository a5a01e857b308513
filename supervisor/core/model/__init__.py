"""Hold what the core knows, and what each thing decides by itself (a queue: its next task).

Tasks, slots, pools, lanes and gates refer to each other, so they live in one room. Events and
actions are the language between core and shell; the ledger keeps what waits for the disk.

May import: ipc.resilience, ipc.wire.
Not for: decisions that concern several of them (core/tasks, core/workers).
"""
