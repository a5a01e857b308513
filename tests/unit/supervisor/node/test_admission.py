"""Submits of a program without a node, checked by what the nodes publish."""

from typing import Any

from msgspec import msgpack

from musterd.ipc.wire.messages import AS_CONFIGURED, INVALID_TASK, TaskDeclaration, TaskSpec
from musterd.supervisor.cluster.engine import NodeCard, PoolCard
from musterd.supervisor.core.model import events
from musterd.supervisor.node.admission import Admission

FETCH = TaskDeclaration("fetch", target="url", cache_ns=1)


def card(name: str, *pools: PoolCard, redact: tuple[str, ...] = ()) -> NodeCard:
    return NodeCard(f"id-{name}", name, pools=pools, redact=redact)


def submit(admission: Admission, *specs: TaskSpec) -> events.TasksSubmitted:
    return admission.admit(events.TasksSubmitted(b"1", 1, list(specs), 0, False))


def spec(name: str = "p.fetch", id_: str = "a", **args: Any) -> TaskSpec:
    return TaskSpec(id_, name, msgpack.encode(args))


def test_tasks_are_completed_by_what_is_declared() -> None:
    admission = Admission()
    admission.learn([card("a", PoolCard("p", 1, (FETCH,)))])
    (task,) = submit(admission, spec(url="https://shop.example/x")).tasks
    assert (task.target, task.cache_ns) == ("shop.example", AS_CONFIGURED)
    assert task.key


def test_a_literal_secret_is_refused_in_the_pools_of_the_nodes_that_say_so() -> None:
    admission = Admission()
    mine, others = PoolCard("p", 1, (FETCH,)), PoolCard("q", 1, (FETCH,))
    admission.learn([card("a", mine, others), card("b", mine, redact=("password",))])
    event = submit(
        admission,
        spec(password="S3cr3t"),
        spec("q.fetch", "b", password="S3cr3t"),
        spec("p.fetch", "c", user="ann"),
    )
    assert [task.id for task in event.tasks] == ["b", "c"]
    (rejection,) = event.rejected
    assert (rejection.id, rejection.code) == ("a", INVALID_TASK)
    assert "password" in rejection.message
    assert "S3cr3t" not in rejection.message


def test_what_is_known_is_replaced() -> None:
    admission = Admission()
    assert not admission.knows([spec()])
    admission.learn([card("a", PoolCard("p", 1, (FETCH,)), redact=("password",))])
    assert admission.knows([spec()])
    assert not admission.knows([spec(), spec("p.other")])
    admission.learn([card("a", PoolCard("q", 1, (FETCH,)))])
    assert not admission.knows([spec()])
    assert submit(admission, spec(password="S3cr3t")).rejected == []
