"""Measure memory and the machine, in threads of its own, for the core and for people.

`probe` looks, `sources` reads the kernel's figures, `pss` weighs workers, `watch` makes events.

May import: api, config, core, core.model, log, processes, system.
Not for: deciding what to do about it (core/workers/pressure.py).
"""
