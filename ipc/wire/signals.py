"""Signals from the supervisor to a worker whose main thread is busy in a handler."""

import signal

# Follows a Recall, CancelLease or Stop on workers.sock: "look into your mailbox now". A real-time
# signal, because libraries and users have their own plans for SIGUSR1, SIGUSR2 and SIGURG; not the
# first ones, because C libraries sometimes keep those below SIGRTMIN+3 for themselves.
INTERRUPT_SIGNAL = int(signal.SIGRTMIN) + 3

# Makes the worker write the stacks of all its threads to stderr (faulthandler, so also when the
# interpreter is stuck in C), before the supervisor kills it for a hard timeout.
DUMP_SIGNAL = int(signal.SIGRTMIN) + 4
