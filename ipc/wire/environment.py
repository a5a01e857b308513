"""What the daemon tells its workers by their environment, and what it keeps of its own."""

LOG_LEVEL_VARIABLE = "MUSTERD_LOG_LEVEL"  # the least level that is logged, of our own loggers
SECRETS_VARIABLE = "MUSTERD_SECRETS"  # which secrets tasks may name, as JSON: secrets/access.py
CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"  # set by systemd

# Addressed to the daemon alone; who heeded them would speak to systemd in its name.
TO_DAEMON = frozenset(
    (
        *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),
        *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
        *("MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE"),
    )
)
OF_DAEMON = TO_DAEMON | {CREDENTIALS_VARIABLE}  # never for workers
