"""Decide about attempts: policies, backoff and circuit breakers, as pure code.

Shared by the core and the workers' toolkit.

May import: nothing of ours.
Not for: anything with a clock of its own.
"""
