"""Environment variables: those that the daemon sets for its workers, and those it keeps."""

LOG_LEVEL_VARIABLE = "MUSTERD_LOG_LEVEL"  # minimum log level of our own loggers
SECRETS_VARIABLE = "MUSTERD_SECRETS"  # which secrets tasks may name, as JSON: secrets/access.py
CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"  # set by systemd

# For the daemon alone: a worker that used them would speak to systemd in the daemon's name.
TO_DAEMON = frozenset(
    (
        *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"),
        *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
        *("MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE"),
    )
)
OF_DAEMON = TO_DAEMON | {CREDENTIALS_VARIABLE}  # never for workers
