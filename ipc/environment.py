"""What the daemon tells its workers by their environment."""

LOG_LEVEL_VARIABLE = "MUSTERD_LOG_LEVEL"  # the least level that is logged, of our own loggers
