"""Every decision of the daemon, without I/O: events in, actions out."""
