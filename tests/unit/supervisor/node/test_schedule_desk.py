"""The desk for schedules: what is asked here first, and what of the cluster."""

from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from musterd.ipc.wire.history import Entries, HistoryEntry
from musterd.ipc.wire.messages import History, Rejection, TaskDeclaration
from musterd.ipc.wire.resolving import Resolve, Resolved
from musterd.ipc.wire.schedule_messages import (
    READ_ONLY,
    SCHEDULES_SHOWN_MAX,
    STILL_RUNNING,
    STORE_FAILS,
    UNKNOWN_SCHEDULE,
    ScheduleAnswer,
    SchedulePut,
    Schedules,
    ShowSchedules,
)
from musterd.ipc.wire.schedule_messages import ScheduleView as Shown
from musterd.supervisor.cluster.engine import (
    Cards,
    DueSchedule,
    NodeCard,
    PoolCard,
    ScheduleView,
    Settled,
    Verdict,
)
from musterd.supervisor.cluster.sidecar_events import (
    EngineAnswered,
    EngineFailed,
    SchedulesAsked,
)
from musterd.supervisor.core.model.policy import SchedulePolicy
from musterd.supervisor.core.model.schedule_events import (
    ScheduleDeleteRequested,
    SchedulePauseRequested,
    ScheduleRunRequested,
)
from musterd.supervisor.core.model.shared import card_of
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.node.engines import THREADS, Job
from musterd.supervisor.node.schedule_desk import ScheduleDesk
from musterd.supervisor.sockets.peers import HistoryWanted, ResolutionWanted, SchedulesWanted
from musterd.supervisor.sockets.schedule_requests import PutWanted

PEER = b"1"
CARDS = Cards("s", (NodeCard("id", "shed", pools=(PoolCard("p", 1),)),))
KITES = SchedulePolicy("kites", "p.extract", Every(10**9))
ENTRY = HistoryEntry(1, 5, "t", "d", b"\x01")


class Clients:
    """The port of clients: notes what is answered."""

    def __init__(self) -> None:
        self.told: dict[int, Any] = {}
        self.gone: set[int] = set()

    def hold(self, peer: Any, number: int) -> int:
        return 100 + number

    def holds(self, token: int) -> bool:
        return token not in self.told and token not in self.gone

    def holder(self, token: int) -> bytes:
        return PEER

    def acknowledge(self, token: int, rejected: list[Rejection]) -> None:
        self.told[token] = [(each.id, each.code) for each in rejected]

    def recall(
        self, wanted: HistoryWanted, entries: Any, error: str = "", *, unknown: bool = False
    ) -> None:
        self.told[wanted.token] = (entries, error, unknown)

    def resolve(self, wanted: ResolutionWanted, found: Resolved) -> None:
        self.told[wanted.token] = found

    def show_later(self, token: int, views: list[Shown], more: bool) -> None:
        self.told[token] = ([each.name for each in views], more)

    def drop(self, token: int, reason: str) -> None:
        self.told[token] = reason


class Bench:
    def __init__(self, *, local: bool = True) -> None:
        self.clients = Clients()
        self.jobs: list[Job] = []
        self.asked: list[SchedulesAsked] = []
        engines: Any = SimpleNamespace(call=self._call)
        ask_local = self.asked.append if local else None
        clients: Any = self.clients
        self.desk = ScheduleDesk(engines, clients, Random(1), ask_local)
        self.desk.local_pools = frozenset(["own"])

    def _call(self, job: Job) -> None:
        assert job.method in THREADS, job.method
        self.jobs.append(job)

    def take(self, event: object) -> None:
        assert self.desk.take(event)

    def local(self, answer: Any) -> None:
        """The supervisor answers the last question."""
        self.desk.told(self.asked.pop().request, answer)

    def engine(self, method: str, result: object) -> Job:
        """The engine answers the last call."""
        job = self.jobs.pop()
        assert job.method == method, job
        job.answered(EngineAnswered(0, result))
        return job

    def fail(self, reason: str) -> None:
        self.jobs.pop().answered(EngineFailed(0, reason))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def unknown(name: str) -> Rejection:
    return Rejection(name, UNKNOWN_SCHEDULE, "")


def put(name: str, task: str) -> SchedulePut:
    return SchedulePut(name, msgspec.msgpack.encode({"task": task, "every": "1h"}))


def view(name: str = "kites", *, alive: str = "", turn: int = 3) -> ScheduleView:
    policy = msgspec.structs.replace(KITES, name=name)
    due = DueSchedule(name, card_of(policy).plan, turn, 7, 100, b"", alive)
    return ScheduleView(due, 9, added=True)


def test_other_events_are_not_for_the_desk(bench: Bench) -> None:
    assert not bench.desk.take(object())


def test_history_is_asked_here_and_then_of_the_cluster(bench: Bench) -> None:
    wanted = HistoryWanted(4, History(1, "kites", 5))
    bench.take(wanted)
    assert bench.asked[-1] == SchedulesAsked(PEER, 4, History(4, "kites", 5))
    bench.local(Entries(4, [ENTRY]))
    assert bench.clients.told[4] == ([ENTRY], "", False)
    bench.take(wanted)
    bench.local(Entries(4, [], "no", True))
    job = bench.engine("history", [ENTRY])
    assert (job.arguments, job.options) == (("kites", None), {"limit": 5})
    assert bench.clients.told[4] == ([ENTRY], "", False)


def test_history_of_no_schedule_and_of_an_engine_that_is_away() -> None:
    bench = Bench(local=False)
    bench.take(HistoryWanted(4, History(1, "kites", 5, [2, 3])))
    job = bench.engine("history", None)
    assert (job.arguments, job.options) == (("kites", (2, 3)), {})
    assert bench.clients.told[4] == ([], "there is no schedule 'kites'", True)
    bench.take(HistoryWanted(5, History(1, "kites", 5)))
    bench.fail("gone")
    assert "does not answer" in bench.clients.told[5][1]


def test_a_function_is_looked_for_here_and_on_all_nodes(bench: Bench) -> None:
    here = (TaskDeclaration("f", place="m:f"), TaskDeclaration("g", place="m:g"))
    cards = Cards(
        "s", (NodeCard("id", "shed", pools=(PoolCard("p", 1, here),)), NodeCard("i", "b"))
    )
    bench.take(ResolutionWanted(4, "m:f"))
    assert bench.asked[-1] == SchedulesAsked(PEER, 4, Resolve(4, "m:f"))
    bench.local(Resolved(4, ["own.f"], ["slow"], [], ["own", "p", "slow"]))
    bench.engine("cards", cards)
    assert bench.clients.told[4] == Resolved(
        4, ["own.f", "p.f"], ["slow"], [], ["own", "p", "slow"]
    )
    bench.take(ResolutionWanted(5, "m:f"))
    bench.local(Resolved(5, ["own.f"], [], [], ["own"]))
    bench.fail("gone")
    told = bench.clients.told[5]
    assert (told.tasks, "does not answer" in told.error) == (["own.f"], True)


def test_a_program_without_a_node_finds_the_tasks_of_all_nodes() -> None:
    bench = Bench(local=False)
    bench.take(ResolutionWanted(4, "m:f"))
    card = PoolCard("p", 1, (TaskDeclaration("f", place="m:f"),))
    bench.engine("cards", Cards("s", (NodeCard("id", "shed", pools=(card,)),)))
    assert bench.clients.told[4] == Resolved(0, ["p.f"], pools=["p"])


def test_what_is_put_goes_to_where_its_pool_is(bench: Bench) -> None:
    puts = [put("a", "own.read"), put("b", "p.extract"), put("c", "nothing.x"), put("d", "p.x")]
    bench.take(PutWanted(PEER, 4, puts))
    assert [each.name for each in bench.asked[-1].message.schedules] == ["a"]  # type: ignore[union-attr]
    bench.local(ScheduleAnswer(4, [Rejection("a", "TooMany", "")]))
    bench.engine("cards", CARDS)
    job = bench.engine("put", [Rejection("d", READ_ONLY, "")])
    assert [each.card.name for each in job.arguments[0]] == ["b", "d"]  # type: ignore[attr-defined]
    assert bench.clients.told[4] == [("a", "TooMany"), ("c", "InvalidSchedule"), ("d", READ_ONLY)]


def test_what_cannot_be_read_is_refused_by_the_checks_of_the_cluster(bench: Bench) -> None:
    bench.take(PutWanted(PEER, 4, [SchedulePut("a", b"\xc1"), SchedulePut("b", b"\x90")]))
    assert not bench.asked
    bench.engine("cards", CARDS)
    bench.engine("put", [])
    assert bench.clients.told[4] == [("a", "InvalidSchedule"), ("b", "InvalidSchedule")]


def test_a_put_without_the_right_says_which_role_it_takes(bench: Bench) -> None:
    bench.take(PutWanted(PEER, 4, [put("b", "p.extract")]))
    bench.engine("cards", CARDS)
    bench.fail("permission denied for function put_1")
    assert bench.clients.told[4] == [("", STORE_FAILS)]


def test_what_is_not_here_is_deleted_in_the_cluster(bench: Bench) -> None:
    bench.take(ScheduleDeleteRequested(["a", "b"], PEER, 4))
    bench.local(ScheduleAnswer(4, [unknown("b"), Rejection("a", READ_ONLY, "")]))
    job = bench.engine("delete", [unknown("b")])
    assert job.arguments == (("b",),)
    assert bench.clients.told[4] == [("a", READ_ONLY), ("b", UNKNOWN_SCHEDULE)]
    bench.take(ScheduleDeleteRequested(["a"], PEER, 5))
    bench.local(ScheduleAnswer(5))
    assert (bench.jobs, bench.clients.told[5]) == ([], [])


def test_a_schedule_that_is_not_here_is_paused_in_the_cluster(bench: Bench) -> None:
    bench.take(SchedulePauseRequested("kites", True, PEER, 4))
    bench.local(ScheduleAnswer(4))
    assert (bench.jobs, bench.clients.told[4]) == ([], [])
    bench.take(SchedulePauseRequested("kites", True, PEER, 5))
    bench.local(ScheduleAnswer(5, [unknown("kites")]))
    assert bench.engine("pause", True).options == {"paused": True}
    assert bench.clients.told[5] == []
    bench.take(SchedulePauseRequested("none", False, PEER, 6))
    bench.local(ScheduleAnswer(6, [unknown("none")]))
    bench.engine("pause", False)
    assert bench.clients.told[6] == [("none", UNKNOWN_SCHEDULE)]


def test_a_run_is_made_by_its_id_again_after_a_lost_race() -> None:
    bench = Bench(local=False)
    bench.take(ScheduleRunRequested("kites", PEER, 4, "@kites.5m"))
    bench.engine("cards", CARDS)
    bench.engine("schedules", [view()])
    assert bench.engine("settle", None).options["resend"]
    bench.engine("cards", CARDS)
    bench.engine("schedules", [view(turn=4)])
    job = bench.engine("settle", Settled((Verdict("@kites.5m", "accepted"),)))
    due, [run] = job.arguments
    assert (due.turn, run.spec.id, run.instant_ns) == (4, "@kites.5m", 5)  # type: ignore[attr-defined]
    assert (job.options["last_ns"], job.options["next_ns"]) == (7, 9)
    assert bench.clients.told[4] == []


def test_a_run_beside_a_live_one_is_refused_unless_it_is_that_one() -> None:
    bench = Bench(local=False)
    for token, id_ in ((4, "@kites.5m"), (5, "@kites.6m")):
        bench.take(ScheduleRunRequested("kites", PEER, token, id_))
        bench.engine("cards", CARDS)
        bench.engine("schedules", [view(alive="@kites.5m")])
    assert bench.clients.told == {4: [], 5: [("@kites.5m", STILL_RUNNING)]}
    bench.take(ScheduleRunRequested("none", PEER, 6, "@none.5m"))
    bench.engine("cards", CARDS)
    bench.engine("schedules", [])
    assert bench.clients.told[6] == [("none", UNKNOWN_SCHEDULE)]


def shown(name: str) -> Shown:
    return Shown(name, "active", "own.read", "every 1h")


def test_lists_of_both_sides_are_one() -> None:
    bench = Bench()
    bench.take(SchedulesWanted(SimpleNamespace(name=PEER), ShowSchedules(1)))  # type: ignore[arg-type]
    bench.local(Schedules(101, [shown("a"), shown("c")]))
    bench.engine("schedules", [view("b"), view("c")])
    assert bench.clients.told[101] == (["a", "b", "c"], False)


def test_a_list_goes_on_behind_the_shorter_one_that_has_more() -> None:
    bench = Bench()
    bench.take(SchedulesWanted(SimpleNamespace(name=PEER), ShowSchedules(1, after="A")))  # type: ignore[arg-type]
    bench.local(Schedules(101, [shown("a"), shown("b")], more=True))
    many = [view(f"a{number:03}") for number in range(SCHEDULES_SHOWN_MAX + 1)]
    job = bench.engine("schedules", many)
    assert job.options == {"after": "A", "limit": SCHEDULES_SHOWN_MAX + 1}
    names, more = bench.clients.told[101]
    assert more
    assert names == ["a", *(f"a{number:03}" for number in range(SCHEDULES_SHOWN_MAX - 1))]


def test_one_schedule_is_shown_from_here_or_from_the_cluster() -> None:
    bench = Bench()
    for number, here in ((1, [shown("kites")]), (2, [])):
        wanted = ShowSchedules(number, "kites")
        bench.take(SchedulesWanted(SimpleNamespace(name=PEER), wanted))  # type: ignore[arg-type]
        bench.local(Schedules(100 + number, here))
    assert bench.engine("schedules", [view()]).arguments == ("kites",)
    assert bench.clients.told == {101: (["kites"], False), 102: (["kites"], False)}


def test_questions_of_clients_that_are_gone_are_forgotten(bench: Bench) -> None:
    bench.take(ScheduleDeleteRequested(["a"], PEER, 4))
    bench.clients.gone.add(4)
    bench.desk.forget_lost()
    bench.local(ScheduleAnswer(4, [unknown("a")]))
    assert bench.jobs == []
