"""Measure memory and the machine, in threads, for the core and for people.

`probe` runs the threads, `sources` reads the kernel's figures, `pss` measures workers, `machine`
the machine, `watch` makes events.

May import: api, config, core, core.model, log, processes, system.
Not for: deciding what to do about it (core/workers/pressure.py).
"""
