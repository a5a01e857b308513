"""The environment of workers, and which secrets they may look up.

A worker runs what others ask for, so it gets nothing that is the daemon's alone. It inherits of the
daemon's environment what any program needs. A pool gives its workers more: variables by `env`, and
variables or systemd credentials of the daemon by their full names in `secrets`.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from musterd.ipc.secrets.access import Access, is_full_name
from musterd.ipc.wire.environment import CREDENTIALS_VARIABLE, LOG_LEVEL_VARIABLE, SECRETS_VARIABLE
from musterd.supervisor.config.pool import PoolConfig
from musterd.supervisor.config.schema import Config


def given(
    name: str, pool: PoolConfig, config: Config, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that workers of this pool get beside what they inherit."""
    named = [each for each in pool.secrets if is_full_name(each)]
    variables = {each: environ[each] for each in named if each in environ}
    credentials = environ.get(CREDENTIALS_VARIABLE, "")
    access = Access(
        pool=name,
        patterns=pool.secrets,
        variables=frozenset((*variables, *pool.env)),
        credentials={each: str(Path(credentials, each)) for each in named} if credentials else {},
        folder=pool.secrets_dir,
        own=tuple(_own_files(config, credentials)),
    )
    return {
        LOG_LEVEL_VARIABLE: config.supervisor.log_level,
        **variables,
        **pool.env,
        SECRETS_VARIABLE: msgspec.json.encode(access, order="deterministic").decode(),
    }


def _own_files(config: Config, credentials: str) -> list[str]:
    """Return the files of the daemon's own secrets, with the credentials that it uses itself."""
    files = list(config.own_files)
    if credentials:
        files += [str(Path(credentials, each)) for each in config.own_secrets]
    return files
