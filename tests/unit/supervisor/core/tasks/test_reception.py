"""Reception: the supervisor serves tasks.sock while there is no sidecar, and says what it knows."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from musterd.ipc.wire.messages import ELSEWHERE, QUEUE_FULL, UNKNOWN_TASK, TaskDeclaration, TaskSpec
from musterd.supervisor.core.fleet import Fleet
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.tasks import reception
from musterd.supervisor.core.tasks.reception import REFUSE_NS, TAKE_OVER_NS
from support.core import PEER, Muster, of

TOLD_OFF = "the schema is too new"


class Node(Muster):
    """A fleet with the shared pool `p` and the local pool `q`."""

    def __init__(self, **more: Any) -> None:
        super().__init__(clustered=True, **more)
        [shared] = self.policy.pools
        local = structs.replace(shared, name="q", clustered=False)
        self.policy = structs.replace(self.policy, pools=(shared, local), cluster="build")
        self.fleet = Fleet(self.policy, Random(1))
        self.start()
        self.tell(events.ForkServerReady("q", (TaskDeclaration("x"),)))

    def connect(self) -> list[Any]:
        return self.tell(events.ClusterConnected())

    def alone(self) -> None:
        """Have no sidecar for a while."""
        assert served(self.wait(TAKE_OVER_NS)) == [True]

    def give_up(self) -> list[Any]:
        return self.tell(events.SidecarExited(1, TOLD_OFF, fatal=True, name=events.CLUSTER))

    def send_again(self, *specs: TaskSpec, live: frozenset[str] = frozenset()) -> list[Any]:
        """Send tasks again; `live` are those that the store holds."""
        [asked] = of(actions.CheckResent, self.submit(*specs, resend=True))
        return self.tell(events.ResendChecked(asked.submitted, frozenset(), live))


def served(answer: list[Any]) -> list[bool]:
    return [each.serve for each in of(actions.ServeClients, answer)]


def answers(answer: list[Any]) -> list[list[tuple[str, str]]]:
    return [[(r.id, r.code) for r in each.rejected] for each in of(actions.Acknowledge, answer)]


def shared(id_: str = "s") -> TaskSpec:
    return TaskSpec(id_, "p.x", b"")


def local(id_: str = "l") -> TaskSpec:
    return TaskSpec(id_, "q.x", b"")


# -- who serves -------------------------------------------------------------------------------


def test_a_sidecar_that_comes_in_time_serves() -> None:
    node = Node()
    assert served(node.connect()) == []
    assert served(node.wait(10 * REFUSE_NS)) == []


def test_without_a_sidecar_the_supervisor_serves_after_a_while() -> None:
    node = Node()
    assert served(node.wait(TAKE_OVER_NS - 1)) == []
    assert served(node.wait(1)) == [True]
    assert served(node.connect()) == [False]


def test_after_the_end_of_a_sidecar_the_next_one_has_its_time() -> None:
    node = Node()
    node.connect()
    node.wait(10 * TAKE_OVER_NS)
    assert served(node.tell(events.ClusterDisconnected())) == []
    node.wait(TAKE_OVER_NS - 1)
    node.connect()
    assert served(node.wait(10 * TAKE_OVER_NS)) == []


def test_a_sidecar_that_has_given_up_is_not_waited_for() -> None:
    node = Node()
    answer = node.give_up()
    assert served(answer) == [True]
    reports = {each.event: each.reason for each in of(actions.Report, answer)}
    assert TOLD_OFF in reports["cluster.local_only"]


def test_a_daemon_that_ends_takes_nothing_over() -> None:
    node = Node()
    node.connect()
    node.tell(events.ShutdownRequested("asked", sockets_survive=False))
    node.tell(events.ClusterDisconnected())
    assert served(node.wait(TAKE_OVER_NS)) == []


def test_a_daemon_without_a_cluster_serves_as_ever() -> None:
    muster = Muster()
    muster.start()
    assert served(muster.wait(10 * REFUSE_NS)) == []
    assert answers(muster.submit(TaskSpec("a", "p.x", b""))) == [[]]
    assert answers(muster.submit(TaskSpec("b", "no.x", b""))) == [[("b", UNKNOWN_TASK)]]


# -- what the sidecar is told -------------------------------------------------------------------


@pytest.mark.parametrize("spec", [shared(), TaskSpec("s", "other.x", b"")])
def test_tasks_of_the_cluster_and_of_unknown_pools_are_elsewhere(spec: TaskSpec) -> None:
    node = Node()
    node.connect()
    assert answers(node.submit(local(), spec)) == [[("s", ELSEWHERE)]]
    assert list(node.fleet.tasks) == ["l"]


def test_a_bulk_of_shared_tasks_is_elsewhere() -> None:
    node = Node()
    node.connect()
    [rejected] = answers(node.submit(*[shared(f"s{number}") for number in range(500)]))
    assert [code for _, code in rejected] == [ELSEWHERE] * 500
    assert not node.fleet.tasks


def test_an_unknown_task_of_a_local_pool_is_refused_here() -> None:
    node = Node()
    node.connect()
    assert answers(node.submit(TaskSpec("a", "q.nothing", b""))) == [[("a", UNKNOWN_TASK)]]


def test_a_task_from_before_its_pool_was_shared_is_known() -> None:
    node = Node()
    node.connect()
    node.tell(events.TasksSubmitted(b"caller", 0, [shared("old")], 0))  # as a stored one would be
    assert answers(node.send_again(shared("old"), shared("new"))) == [[("new", ELSEWHERE)]]


def test_a_stored_task_whose_pool_is_gone_is_not_given_to_the_cluster() -> None:
    node = Node()
    node.connect()
    gone = TaskSpec("gone", "gone.x", b"")
    assert answers(node.send_again(gone)) == [[("gone", ELSEWHERE)]]
    assert answers(node.send_again(gone, live=frozenset({"gone"}))) == [[("gone", UNKNOWN_TASK)]]


def test_callers_of_the_control_socket_are_not_refused() -> None:
    node = Node()
    node.connect()
    answer = node.tell(events.TasksSubmitted(b"caller", 0, [shared()], 0))
    assert answers(answer) == [[]]


def test_the_sidecar_is_told_which_pools_are_local() -> None:
    node = Node()
    [told] = of(actions.ShowPools, node.connect())
    assert [card.name for card in told.cards] == ["p"]
    assert told.local == ("q",)
    without = structs.replace(node.policy, pools=node.policy.pools[:1])
    [told] = of(actions.ShowPools, node.tell(events.PolicyChanged(without)))
    assert told.local == ()


# -- alone ------------------------------------------------------------------------------------


def test_alone_local_tasks_are_taken_and_others_wait_for_a_sidecar() -> None:
    node = Node()
    node.alone()
    assert answers(node.submit(local())) == [[]]
    assert answers(node.submit(shared(), local("l2"))) == []
    assert list(node.fleet.tasks) == ["l", "l2"]
    answer = node.connect()
    [dropped] = of(actions.DropRequest, answer)
    assert (dropped.peer, dropped.request) == (PEER, 2)
    assert served(answer) == [False]


def test_what_waits_for_too_long_is_refused_unless_it_was_sent_before() -> None:
    node = Node()
    node.alone()
    assert answers(node.submit(shared(), local())) == []
    assert answers(node.send_again(shared("again"))) == []
    [rejected] = answers(node.wait(REFUSE_NS))
    assert rejected == [("s", QUEUE_FULL)]
    assert answers(node.submit(shared("later"))) == [[("later", QUEUE_FULL)]]
    [dropped] = of(actions.DropRequest, node.connect())
    assert dropped.request == 2  # the cluster is asked about it


def test_a_refusal_says_why_there_is_no_sidecar() -> None:
    node = Node()
    assert answers(node.submit(shared("early"))) == [[("early", ELSEWHERE)]]
    node.give_up()
    [told] = of(actions.Acknowledge, node.submit(shared()))
    assert TOLD_OFF in told.rejected[0].message
    assert told.rejected[0].retry_after_ns > 0


def test_what_waits_is_refused_when_the_sidecar_gives_up() -> None:
    node = Node()
    node.alone()
    node.submit(shared())
    assert answers(node.give_up()) == [[("s", QUEUE_FULL)]]


def test_the_refusal_of_a_part_waits_for_the_disk_like_the_rest() -> None:
    node = Node()
    node.give_up()
    node.disk_works = False
    assert answers(node.submit(shared(), local())) == []
    assert answers(node.commit()) == [[("s", QUEUE_FULL)]]


def test_a_client_that_goes_leaves_nothing_behind() -> None:
    node = Node()
    node.alone()
    node.submit(shared())
    [dropped] = of(actions.DropRequest, node.tell(events.PeerLost(PEER)))
    assert dropped.reason == reception.GONE
    assert not of(actions.DropRequest, node.connect())
