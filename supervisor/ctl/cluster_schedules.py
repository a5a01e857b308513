"""What `musterctl --cluster schedule` does."""

from musterd.supervisor.api.status import ScheduleList, ScheduleStatus
from musterd.supervisor.cluster.postgres import PostgresEngine
from musterd.supervisor.ctl.cluster_link import ClusterRefused


def listed(engine: PostgresEngine) -> ScheduleList:
    """Return the schedules of the cluster."""
    raise ClusterRefused("schedules of the cluster are not there yet")


def run(engine: PostgresEngine, name: str) -> ScheduleStatus:
    """Run a schedule now."""
    raise ClusterRefused("schedules of the cluster are not there yet")


def pause(engine: PostgresEngine, name: str, *, paused: bool) -> ScheduleStatus:
    """Pause a schedule, or let it go on."""
    raise ClusterRefused("schedules of the cluster are not there yet")
