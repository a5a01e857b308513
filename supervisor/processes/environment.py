"""Choose the environment variables that processes of the daemon inherit."""

import os
from collections.abc import Mapping

from musterd.ipc.wire.environment import TO_DAEMON

# What a program needs to find its files, language, time zone, certificates and proxy.
_INHERITED = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "TERM", "HOSTNAME"),
        *("LANG", "LANGUAGE", "TZ", "TZDIR", "TMPDIR", "TMP", "TEMP", "VIRTUAL_ENV"),
        *("DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("NODE_EXTRA_CA_CERTS", "NODE_OPTIONS", "GLIBC_TUNABLES", "NO_COLOR", "SOURCE_DATE_EPOCH"),
        *("INVOCATION_ID", "JOURNAL_STREAM", "RUNTIME_DIRECTORY", "STATE_DIRECTORY"),
        *("CACHE_DIRECTORY", "LOGS_DIRECTORY", "CONFIGURATION_DIRECTORY"),
    )
)
_INHERITED_PREFIXES = (
    *("LC_", "LD_", "XDG_", "PYTHON", "COVERAGE_", "PLAYWRIGHT_", "FONTCONFIG_"),
    *("MALLOC_", "OMP_", "OPENBLAS_", "MKL_"),
)
_PROXIES = frozenset(("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy"))


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a worker gets without configuration."""
    return {
        name: value
        for name, value in environ.items()
        if name in _INHERITED or name.startswith(_INHERITED_PREFIXES) or name.lower() in _PROXIES
    }


def of_daemon() -> dict[str, str]:
    """Return the environment of a process that is part of the daemon: a sidecar, a clean-up."""
    return {name: value for name, value in os.environ.items() if name not in TO_DAEMON}
