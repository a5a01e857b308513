"""What workers and the supervisor are told about artefacts of failed attempts."""

import msgspec
from msgspec import structs

from musterd.ipc.wire.artefacts import FOLDER, Keep
from musterd.supervisor.config.schema import Config
from musterd.supervisor.processes.forkserver_messages import WorkerSettings
from musterd.supervisor.system import directories


def keep_of(config: Config) -> Keep:
    """Return where artefacts are, and how many are kept."""
    folder = directories.state_dir(config.supervisor.state_dir) / FOLDER
    given = config.artefacts
    return Keep(str(folder), given.count, given.bytes, given.age_ns)


def with_artefacts(settings: WorkerSettings, config: Config) -> WorkerSettings:
    """Return the settings of workers, with artefacts if any are to be kept."""
    if not config.artefacts.enabled:
        return settings
    return structs.replace(settings, artefacts=msgspec.msgpack.encode(keep_of(config)))
