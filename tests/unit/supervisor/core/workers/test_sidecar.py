"""The life of the web process: the core's decisions, action by action."""

from random import Random

from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions as act
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.events import (
    CLUSTER,
    EXIT_TAKEN,
    SidecarBeat,
    SidecarExited,
    SidecarReady,
)
from musterd.supervisor.core.model.policy import FleetPolicy
from musterd.supervisor.core.shutdown import Phase
from musterd.supervisor.core.workers.sidecar import SILENCE_NS, START_NS, STOP_NS, SidecarState

POLICY = FleetPolicy(pools=(), web="a")
WEB = (act.StartSidecar, act.StopSidecar, act.KillSidecar, act.Report, act.Exit)


class Rig:
    def __init__(self, policy: FleetPolicy = POLICY) -> None:
        self.policy = policy
        self.now_ns = 1000
        self.fleet = Fleet(policy, Random(1))
        self.web = self.fleet.sidecars["web"]

    def tell(self, event: object, after_ns: int = 0) -> list[object]:
        self.now_ns += after_ns
        return [each for each in self.fleet.handle(self.now_ns, event) if isinstance(each, WEB)]

    def wait(self, nanoseconds: int) -> list[object]:
        """Let time pass; return what is decided when nothing else happens."""
        end_ns, out = self.now_ns + nanoseconds, []
        while (due_ns := self.fleet.next_deadline()) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            out += self.tell(events.Ticked())
        self.now_ns = end_ns
        return out

    def up(self) -> "Rig":
        self.tell(events.Started())
        self.tell(SidecarReady(1, 42, "http://x"))
        return self

    def follow(self, web: str) -> list[object]:
        return self.tell(events.PolicyChanged(structs.replace(self.policy, web=web)))


def names(out: list[object]) -> list[str]:
    return [each.event if isinstance(each, act.Report) else type(each).__name__ for each in out]


def test_it_starts_with_the_daemon_and_says_where_it_listens() -> None:
    rig = Rig()
    assert rig.tell(events.Started()) == [act.StartSidecar(1, "a")]
    assert names(rig.tell(SidecarReady(1, 42, "http://x"))) == ["web.ready"]
    assert (rig.web.state, rig.web.pid, rig.web.address) == (SidecarState.UP, 42, "http://x")


def test_without_an_address_there_is_none() -> None:
    rig = Rig(FleetPolicy(pools=()))
    assert rig.tell(events.Started()) == []
    assert rig.web.state == SidecarState.DOWN


def test_a_crash_is_followed_by_a_start_at_once_then_by_growing_pauses() -> None:
    rig = Rig().up()
    assert names(rig.tell(SidecarExited(1, "it died"))) == ["web.crashed"]
    assert rig.wait(0) == [act.StartSidecar(2, "a")]
    pauses = []
    for number in range(2, 12):
        rig.tell(SidecarExited(number, "it died"))
        began_ns = rig.now_ns
        assert rig.wait(70 * SECOND_NS)[0] == act.StartSidecar(number + 1, "a")
        rig.now_ns = max(rig.now_ns, began_ns)
        pauses.append(rig.web._state.now_ns - began_ns)
    assert pauses[0] >= 0.9 * SECOND_NS
    assert 50 * SECOND_NS <= pauses[-1] <= 66 * SECOND_NS
    assert rig.web.restarts == 11


def test_news_of_a_former_one_mean_nothing() -> None:
    rig = Rig().up()
    rig.tell(SidecarExited(1, "it died"))
    rig.wait(0)
    assert rig.tell(SidecarExited(1, "again")) == []
    assert rig.tell(SidecarReady(1, 7, "http://old")) == []
    assert rig.web.state == SidecarState.STARTING


def test_one_that_says_that_trying_again_will_not_help_waits_for_a_reload() -> None:
    rig = Rig()
    rig.tell(events.Started())
    assert names(rig.tell(SidecarExited(1, "no starlette", fatal=True))) == ["web.fatal"]
    assert rig.wait(600 * SECOND_NS) == []
    assert rig.follow("a") == [act.StartSidecar(2, "a")]


def test_one_that_does_not_come_up_is_killed_and_started_again() -> None:
    rig = Rig()
    rig.tell(events.Started())
    assert rig.wait(START_NS) == [act.KillSidecar(1)]
    rig.tell(SidecarExited(1, "it was ended by signal 9"))
    assert "not up within" in rig.web.reason
    assert rig.wait(0) == [act.StartSidecar(2, "a")]


def test_one_that_gives_no_sign_of_life_is_killed() -> None:
    rig = Rig().up()
    for _ in range(20):
        assert rig.wait(SILENCE_NS // 2) == []
        rig.tell(SidecarBeat(1))
    assert rig.wait(SILENCE_NS) == [act.KillSidecar(1)]
    rig.tell(SidecarExited(1, "it was ended by signal 9"))
    assert "no sign of life" in rig.web.reason


def test_another_address_ends_it_first_and_starts_it_then() -> None:
    rig = Rig().up()
    assert rig.follow("b") == [act.StopSidecar(1)]
    assert rig.wait(STOP_NS) == [act.KillSidecar(1)]
    assert rig.tell(SidecarExited(1, "ended")) == [act.StartSidecar(2, "b")]


def test_an_address_that_is_taken_away_ends_it_for_good() -> None:
    rig = Rig().up()
    assert rig.follow("") == [act.StopSidecar(1)]
    assert rig.tell(SidecarExited(1, "ended")) == []
    assert rig.wait(600 * SECOND_NS) == []


def test_it_ends_with_the_daemon_and_is_there_until_its_workers_are_gone() -> None:
    rig = Rig().up()
    out = rig.tell(events.ShutdownRequested("asked"))
    assert not any(isinstance(each, act.StopSidecar) for each in out)
    out = rig.tell(events.CleanupFinished())
    assert act.StopSidecar(1) in out
    assert rig.tell(SidecarExited(1, "ended")) == []


def test_a_shutdown_in_a_pause_starts_nothing() -> None:
    rig = Rig().up()
    rig.tell(SidecarExited(1, "it died"))
    rig.wait(0)
    rig.tell(SidecarExited(2, "it died"))
    rig.tell(events.ShutdownRequested("asked"))
    rig.tell(events.CleanupFinished())
    assert not any(isinstance(each, act.StartSidecar) for each in rig.wait(60 * SECOND_NS))


def test_a_cluster_sidecar_whose_name_is_another_nodes_ends_the_daemon() -> None:
    rig = Rig(FleetPolicy(pools=(), cluster="a"))
    rig.tell(events.Started())
    out = rig.tell(SidecarExited(1, "'shed' is alive", name=CLUSTER, code=EXIT_TAKEN))
    assert names(out)[0] == "cluster.fatal"
    assert rig.fleet.phase == Phase.CLEANUP
    [leave] = [each for each in rig.tell(events.CleanupFinished()) if isinstance(each, act.Exit)]
    assert leave.code == EXIT_TAKEN


def test_the_exit_code_of_other_sidecars_means_nothing_else() -> None:
    rig = Rig().up()
    assert names(rig.tell(SidecarExited(1, "it died", code=EXIT_TAKEN))) == ["web.crashed"]
