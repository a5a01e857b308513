"""Client and AsyncClient with a real ROUTER that speaks the protocol and can misbehave."""

import asyncio
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from musterd.ipc.client import async_submit, session, sync_submit
from musterd.ipc.client.async_client import AsyncClient
from musterd.ipc.client.async_submit import AsyncTaskHandle
from musterd.ipc.client.sync_client import Client
from musterd.ipc.client.sync_submit import TaskHandle
from musterd.ipc.errors import (
    ConfigurationError,
    InvalidTask,
    NotConnected,
    QueueFull,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
    TaskMissing,
    UnknownTask,
)
from musterd.ipc.wire.codec import decode_client, encode
from musterd.ipc.wire.messages import (
    CANCELLED,
    EXPIRED,
    FAILED,
    PROTOCOL,
    SUCCEEDED,
    Accepted,
    Cancel,
    ClientMessage,
    Failure,
    Hello,
    Inspect,
    Inspected,
    Missing,
    Outcome,
    Refused,
    Rejection,
    Results,
    Submit,
    TaskSpec,
    TaskView,
    Watch,
    Welcome,
)
from support.waiting import wait_for

DEADLINE = 20.0  # far more than any test here takes


class Stored:
    """What a supervisor keeps across restarts."""

    def __init__(self) -> None:
        self.tasks: dict[str, TaskSpec] = {}
        self.unfinished: dict[str, None] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.submits: list[Submit] = []
        self.watches: list[str] = []


class Supervisor:
    """A ROUTER in a thread. Stores and echoes tasks; the attributes make it misbehave."""

    def __init__(self, path: str, epoch: str = "epoch-1", stored: Stored | None = None) -> None:
        self.path = path
        self.epoch = epoch
        self.stored = stored or Stored()
        self.refuses = ""
        self.answers = 1  # how often each message is sent
        self.garbage = b""  # sent before each message
        self.acknowledges = True
        self.finishes = True
        self.loses_results = False
        self.room = 10**9  # tasks accepted before QueueFull
        self.hellos = 0
        self._peers: dict[str, bytes] = {}
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)  # drops no message by itself
        self._router.bind(f"ipc://{path}")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._commands.put(None)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def finish_all(self) -> None:
        """Finish all unfinished tasks; from now on, finish tasks at once."""
        self._commands.put(self._finish_all)

    def send_later(self, *messages: object) -> None:
        """Send the messages to every peer seen so far."""
        peers = set(self._peers.values())
        self._commands.put(lambda: [self._send(p, m) for p in peers for m in messages])

    def _run(self) -> None:
        try:
            while True:
                while not self._commands.empty():
                    command = self._commands.get()
                    if command is None:
                        return
                    command()
                if self._router.poll(2):
                    peer, frame = self._router.recv_multipart()
                    self._answer(peer, decode_client(frame))
        finally:
            self._router.close()
            self._context.term()

    def _send(self, peer: bytes, message: object) -> None:
        for _ in range(self.answers):
            if self.garbage:
                self._router.send_multipart([peer, self.garbage])
            self._router.send_multipart([peer, encode(message)])

    def _answer(self, peer: bytes, message: ClientMessage) -> None:
        match message:
            case Hello():
                self.hellos += 1
                if self.refuses:
                    self._send(peer, Refused(PROTOCOL + 1, self.refuses))
                else:
                    self._send(peer, Welcome(PROTOCOL, self.epoch))
            case Submit():
                self._submit(peer, message)
            case Watch():
                self.stored.watches.extend(message.ids)
                for task_id in message.ids:
                    self._watch(peer, task_id)
            case Inspect():
                self._send(peer, Inspected(message.request, self._view(message.id)))
            case Cancel():
                for task_id in message.ids:
                    self._finish(Outcome(task_id, CANCELLED))

    def _submit(self, peer: bytes, message: Submit) -> None:
        self.stored.submits.append(message)
        rejected = []
        for spec in message.tasks:
            if spec.name == "nobody.knows":
                rejected.append(Rejection(spec.id, "UnknownTask", "no such pool"))
            elif spec.id not in self.stored.tasks and self.room <= 0:
                rejected.append(Rejection(spec.id, "QueueFull", "no room", 1_000_000))
            else:
                self._peers[spec.id] = peer
                if spec.id not in self.stored.tasks:
                    self.room -= 1
                    self.stored.tasks[spec.id] = spec
                    self.stored.unfinished[spec.id] = None
        if self.acknowledges:
            self._send(peer, Accepted(message.request, rejected))
        if self.finishes:
            self._finish_all()

    def _watch(self, peer: bytes, task_id: str) -> None:
        self._peers[task_id] = peer
        if task_id in self.stored.outcomes:
            self._send(peer, Results([self.stored.outcomes[task_id]]))
        elif task_id not in self.stored.tasks:
            self._send(peer, Missing([task_id]))

    def _view(self, task_id: str) -> TaskView | None:
        spec = self.stored.tasks.get(task_id)
        return spec and TaskView(task_id, spec.name, "queued", "normal", target=spec.target)

    def _finish_all(self) -> None:
        self.finishes = True
        for task_id in list(self.stored.unfinished):
            self._finish(_outcome(self.stored.tasks[task_id]))

    def _finish(self, outcome: Outcome) -> None:
        self.stored.outcomes[outcome.id] = outcome
        self.stored.unfinished.pop(outcome.id, None)
        if outcome.id in self._peers and not self.loses_results:
            self._send(self._peers[outcome.id], Results([outcome]))


def _outcome(spec: TaskSpec) -> Outcome:
    match spec.name:
        case "demo.fail":
            failure = Failure("error", "ValueError", "no such page", "Traceback ...", 404)
            return Outcome(spec.id, FAILED, b"", failure, 4)
        case "demo.expire":
            return Outcome(spec.id, EXPIRED)
        case "demo.nothing":
            return Outcome(spec.id, SUCCEEDED)
        case _:
            return Outcome(spec.id, SUCCEEDED, spec.args, None, 1)


@pytest.fixture
def path(tmp_path) -> str:
    return str(tmp_path / "tasks.sock")


@pytest.fixture
def supervisor(path) -> Iterator[Supervisor]:
    supervisor = Supervisor(path)
    yield supervisor
    supervisor.stop()


@pytest.fixture
def client(supervisor) -> Iterator[Client]:
    with Client(supervisor.path) as client:
        yield client


# -- results ----------------------------------------------------------------------------------


def test_a_result_comes_back(client):
    task = client.submit("demo.echo", {"url": "u", "n": [1, 2]}, target="site")
    assert task.result(DEADLINE) == {"url": "u", "n": [1, 2]}
    assert task.done()
    assert task.state == SUCCEEDED
    assert task.outcome().attempts == 1
    assert client.submit("demo.nothing").result(DEADLINE) is None


def test_a_failure_is_raised_with_what_the_worker_said(client):
    task = client.submit("demo.fail")
    with pytest.raises(TaskFailed, match="after 4 attempts: ValueError: no such page") as caught:
        task.result(DEADLINE)
    error = caught.value
    assert (error.kind, error.type, error.status, error.attempts) == ("error", "ValueError", 404, 4)
    assert error.traceback == "Traceback ..."
    assert task.outcome().state == FAILED


def test_an_expired_task_raises_task_expired(client):
    with pytest.raises(TaskExpired):
        client.submit("demo.expire").result(DEADLINE)


def test_a_cancelled_task_raises_task_cancelled(supervisor, client):
    supervisor.finishes = False
    task = client.submit("demo.echo")
    task.cancel()
    with pytest.raises(TaskCancelled):
        task.result(DEADLINE)
    task.cancel()  # a second cancel has no effect


def test_a_result_that_takes_longer_than_the_timeout_can_be_asked_for_again(supervisor, client):
    supervisor.finishes = False
    task = client.submit("demo.echo", {"n": 1})
    with pytest.raises(TimeoutError, match=task.id):
        task.result(timeout=0.05)
    assert not task.done()
    task.ack(DEADLINE)
    assert task.state == "accepted"
    supervisor.finish_all()
    assert task.result(DEADLINE) == {"n": 1}


def test_the_status_is_what_the_supervisor_says(supervisor, client):
    supervisor.finishes = False
    task = client.submit("demo.echo", target="site")
    view = task.status(DEADLINE)
    assert (view.id, view.name, view.state, view.target) == (task.id, "demo.echo", "queued", "site")


def test_a_task_is_found_again_by_its_id(supervisor, client):
    task_id = client.submit("demo.echo", {"n": 7}).id
    client.flush(DEADLINE)
    with Client(supervisor.path) as other:
        assert other.task(task_id).result(DEADLINE) == {"n": 7}
        with pytest.raises(TaskMissing, match="nowhere"):
            other.task("nowhere").result(DEADLINE)
        with pytest.raises(TaskMissing):
            other.task("nowhere").status(DEADLINE)
        with pytest.raises(InvalidTask):
            other.task("")


def test_a_task_under_way_is_found_as_the_same_handle(supervisor, client):
    supervisor.finishes = False
    task = client.submit("demo.echo")
    assert client.task(task.id) is task


def test_results_told_twice_between_garbage_come_back_once(supervisor, client, caplog):
    supervisor.answers = 2
    supervisor.garbage = b"\xc1 not msgpack"
    finished = [task.result() for task in client.map("demo.echo", ({"n": n} for n in range(50)))]
    assert sorted(result["n"] for result in finished) == list(range(50))
    assert client._link.malformed > 50
    assert len([r for r in caplog.records if "was dropped" in r.message]) == 1


# -- many -------------------------------------------------------------------------------------


def test_submit_many_is_one_message(supervisor, client):
    client.submit("demo.echo").result(DEADLINE)
    done = queue.SimpleQueue[object]()
    tasks = client.submit_many(
        [
            ("demo.echo", {"n": 0}),
            ("demo.echo", {"n": 1}, {"priority": "low", "target": "site"}),
            ("demo.echo", None, {"wait": True, "on_done": done.put}),
        ]
    )
    assert [task.result(DEADLINE) for task in tasks] == [{"n": 0}, {"n": 1}, {}]
    assert len(supervisor.stored.submits) == 2
    spec = supervisor.stored.tasks[tasks[1].id]
    assert (spec.priority, spec.target) == (3, "site")
    assert done.get(timeout=DEADLINE) is tasks[2]


def test_submit_many_sends_nothing_if_one_task_is_wrong(supervisor, client):
    with pytest.raises(InvalidTask, match="page"):
        client.submit_many([("demo.echo", {"n": 0}), ("demo.echo", {"page": object()})])
    client.flush(DEADLINE)
    assert supervisor.stored.tasks == {}


def test_thousands_of_single_submits_go_out_in_few_messages(supervisor, client):
    tasks = [client.submit("demo.echo", {"n": n}) for n in range(5_000)]
    assert [task.result(DEADLINE)["n"] for task in tasks] == list(range(5_000))
    assert len(supervisor.stored.submits) < 2_500


def test_a_submit_that_nobody_waits_for_still_goes_out(supervisor, client):
    client.submit("demo.echo").result(DEADLINE)
    supervisor.acknowledges = supervisor.finishes = False
    for _ in range(3):  # the first is sent at once, the others stay in the batch
        client.submit("demo.echo")
    wait_for("the batch is sent", lambda: len(supervisor.stored.tasks) == 4)
    supervisor.send_later(*(Accepted(submit.request) for submit in supervisor.stored.submits))


def test_more_tasks_than_may_be_unacknowledged_wait_for_room(supervisor, client, monkeypatch):
    monkeypatch.setattr(session, "UNACKED_TASKS_MAX", 100)
    most = 0
    for n in range(1_000):
        client.submit("demo.echo", {"n": n})
        most = max(most, client._link.session.unacked_tasks)
    client.flush(DEADLINE)
    assert len(supervisor.stored.tasks) == 1_000
    assert 50 < most <= 100


def test_map_is_lazy_and_holds_only_its_window(supervisor, client, monkeypatch):
    monkeypatch.setattr(sync_submit, "MAP_WINDOW", 10)
    supervisor.finishes = False
    taken = []

    def source() -> Iterator[dict[str, int]]:
        for n in range(100):
            taken.append(n)
            if n == 9:
                supervisor.finish_all()
            yield {"n": n}

    yielded = 0
    for task in client.map("demo.echo", source(), priority="low"):
        assert task.done()
        yielded += 1
        assert len(taken) <= yielded + 10
    assert yielded == 100


def test_map_waits_while_the_queue_is_full(supervisor, client):
    supervisor.room = 3
    results = set()
    for task in client.map("demo.echo", ({"n": n} for n in range(30))):
        results.add(task.result()["n"])
        supervisor.room += 1
    assert results == set(range(30))


def test_as_completed_yields_each_handle_once_as_it_finishes(supervisor, client):
    early = client.submit("demo.echo")
    early.result(DEADLINE)
    supervisor.finishes = False
    late = client.submit("demo.echo")
    completed = client.as_completed([late, early, late], timeout=DEADLINE)
    assert next(completed) is early
    supervisor.finish_all()
    assert list(completed) == [late]
    supervisor.finishes = False
    with pytest.raises(TimeoutError):
        next(client.as_completed([client.submit("demo.echo")], timeout=0.05))


# -- rejections -------------------------------------------------------------------------------


def test_a_rejection_is_raised_by_result_and_by_ack(client):
    task = client.submit("nobody.knows")
    with pytest.raises(UnknownTask, match="no such pool"):
        task.result(DEADLINE)
    with pytest.raises(UnknownTask):
        task.ack(DEADLINE)
    assert task.state == "rejected"
    client.flush(DEADLINE)  # the error has been seen


def test_a_rejection_nobody_saw_is_raised_by_flush_once(client):
    client.submit_many([("nobody.knows", None)] * 3)
    with pytest.raises(UnknownTask, match="3 tasks"):
        client.flush(DEADLINE)
    client.flush(DEADLINE)


def test_a_rejection_nobody_saw_is_raised_when_leaving_with(supervisor):
    with pytest.raises(UnknownTask), Client(supervisor.path) as client:
        client.submit("nobody.knows")
    assert client._driver.closed


def _submit_and_fail(path: str, name: str) -> None:
    with Client(path) as client:
        client.submit(name)
        raise KeyError("mine")


def test_an_error_inside_with_is_not_replaced_by_a_rejection(supervisor, caplog):
    with pytest.raises(KeyError):
        _submit_and_fail(supervisor.path, "nobody.knows")
    assert "leaving the client" in caplog.text


def test_an_error_inside_with_does_not_wait_for_a_supervisor_that_is_silent(supervisor):
    supervisor.acknowledges = False
    with pytest.raises(KeyError):  # close() without an error would wait forever
        _submit_and_fail(supervisor.path, "demo.echo")


def test_a_full_queue_is_an_error_that_says_when_to_come_back(supervisor, client):
    supervisor.room = 0
    with pytest.raises(QueueFull) as caught:
        client.submit("demo.echo").ack(DEADLINE)
    assert caught.value.retry_after == 0.001


def test_wait_blocks_until_a_full_queue_has_room(supervisor, client):
    supervisor.room = 0
    returned = threading.Event()

    def submit() -> None:
        client.submit("demo.echo", wait=True)
        returned.set()

    thread = threading.Thread(target=submit)
    thread.start()
    wait_for("it is sent again", lambda: len(supervisor.stored.submits) >= 3)
    assert not returned.is_set()
    supervisor.room = 1
    thread.join(DEADLINE)
    assert returned.is_set()
    assert len({spec.id for submit in supervisor.stored.submits for spec in submit.tasks}) == 1


# -- connection -------------------------------------------------------------------------------


def test_no_supervisor_is_not_connected_with_path_and_advice(path):
    client = Client(path, connect_timeout=0.1)
    task = client.submit("demo.echo")  # pipelined: does not wait
    for wait in (task.result, task.ack, client.flush, client.close):
        if wait == client.close:
            with pytest.raises(NotConnected):
                client.close()
        else:
            with pytest.raises(NotConnected, match="no such socket; start musterd") as caught:
                wait()
            assert path in str(caught.value)
    with pytest.raises(NotConnected, match="closed"):
        client.submit("demo.echo")


def test_a_socket_nobody_listens_on_is_told_apart(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)  # the file stays after the listener has closed
    client = Client(path, connect_timeout=0.1)
    with pytest.raises(NotConnected, match="nobody answers"):
        client.submit("demo.echo").result()
    with pytest.raises(NotConnected):
        client.close()


def test_a_path_too_long_for_a_socket_is_a_clear_error():
    with pytest.raises(ConfigurationError, match="205 bytes"):
        Client("/tmp/" + "x" * 200)


def test_a_refusal_is_not_connected_with_its_reason(supervisor):
    supervisor.refuses = "this client is too old"
    client = Client(supervisor.path)
    with pytest.raises(NotConnected, match="this client is too old"):
        client.submit("demo.echo").result(DEADLINE)
    with pytest.raises(NotConnected):
        client.close()


def test_a_supervisor_that_starts_late_gets_what_was_submitted_before(path):
    with Client(path, connect_timeout=DEADLINE) as client:
        tasks = [client.submit("demo.echo", {"n": n}) for n in range(100)]
        supervisor = Supervisor(path)
        try:
            assert [task.result(DEADLINE)["n"] for task in tasks] == list(range(100))
            assert not any(submit.resend for submit in supervisor.stored.submits)
        finally:
            client.close()
            supervisor.stop()


def test_unacknowledged_tasks_are_sent_again_after_a_restart_with_the_same_ids(path):
    first = Supervisor(path)
    first.acknowledges = first.finishes = False
    with Client(path) as client:
        tasks = [client.submit("demo.echo", {"n": n}) for n in range(200)]
        wait_for("all arrive", lambda: len(first.stored.tasks) == 200)
        first.stop()
        second = Supervisor(path, "epoch-2")
        try:
            assert [task.result(DEADLINE)["n"] for task in tasks] == list(range(200))
            assert all(submit.resend for submit in second.stored.submits)
            assert set(second.stored.tasks) == {task.id for task in tasks}
        finally:
            client.close()
            second.stop()


def test_acknowledged_tasks_are_watched_again_after_a_restart(path):
    first = Supervisor(path)
    first.finishes = False
    with Client(path) as client:
        tasks = client.submit_many([("demo.echo", {"n": n}) for n in range(10)])
        for task in tasks:
            task.ack(DEADLINE)
        waiter = threading.Thread(target=tasks[0].result)  # waits across the restart
        waiter.start()
        first.stop()
        second = Supervisor(path, "epoch-2", first.stored)
        second.finishes = False
        try:
            wait_for("all are watched", lambda: len(second.stored.watches) >= 10)
            assert len(second.stored.submits) == 1  # no task was submitted again
            second.finish_all()
            assert [task.result(DEADLINE)["n"] for task in tasks] == list(range(10))
            waiter.join(DEADLINE)
            assert not waiter.is_alive()
        finally:
            client.close()
            second.stop()


def test_a_task_that_a_restart_lost_is_missing(path):
    first = Supervisor(path)
    first.finishes = False
    with Client(path) as client:
        task = client.submit("demo.echo")
        task.ack(DEADLINE)
        first.stop()
        second = Supervisor(path, "epoch-2")
        try:
            with pytest.raises(TaskMissing):
                task.result(DEADLINE)
        finally:
            second.stop()


def test_a_new_epoch_on_the_same_connection_is_noticed(supervisor, client):
    supervisor.acknowledges = supervisor.finishes = False
    task = client.submit("demo.echo", {"n": 1})
    wait_for("it arrives", lambda: task.id in supervisor.stored.tasks)
    supervisor.acknowledges = supervisor.finishes = True
    supervisor.send_later(Welcome(PROTOCOL, "epoch-2"))
    assert task.result(DEADLINE) == {"n": 1}
    assert supervisor.stored.submits[-1].resend


def test_an_acknowledgement_and_a_result_that_were_dropped_are_asked_for_again(
    supervisor, client, monkeypatch
):
    monkeypatch.setattr(session, "REFRESH_NS", 50_000_000)
    supervisor.loses_results = True
    stored = client.submit("demo.echo", {"n": 1})
    stored.ack(DEADLINE)
    supervisor.acknowledges = False
    unacknowledged = client.submit("demo.echo", {"n": 2})
    wait_for("both have ended", lambda: len(supervisor.stored.outcomes) == 2)
    supervisor.acknowledges = True
    assert unacknowledged.result(DEADLINE) == {"n": 2}
    assert stored.result(DEADLINE) == {"n": 1}


def test_tasks_keep_flowing_while_the_supervisor_restarts_again_and_again(path):
    stored = Stored()
    supervisor = Supervisor(path, "epoch-0", stored)
    with Client(path) as client:
        results = []

        def work() -> None:
            results.extend(
                task.result()["n"]
                for task in client.map("demo.echo", ({"n": n} for n in range(9_000)))
            )

        worker = threading.Thread(target=work)
        worker.start()
        for epoch in range(1, 5):
            seen = len(stored.tasks)
            wait_for(
                "progress",
                lambda seen=seen: len(stored.tasks) > seen + 200 or not worker.is_alive(),
            )
            supervisor.stop()
            supervisor = Supervisor(path, f"epoch-{epoch}", stored)
        try:
            worker.join(DEADLINE)
            assert sorted(results) == list(range(9_000))
            assert len(stored.tasks) == 9_000
            assert stored.watches or any(submit.resend for submit in stored.submits)
        finally:
            client.close()
            supervisor.stop()


# -- threads ----------------------------------------------------------------------------------


def test_many_threads_share_one_client(client):
    wrong = []

    def work(thread: int) -> None:
        for n in range(60):
            expected = {"thread": thread, "n": n}
            if client.submit("demo.echo", expected).result(DEADLINE) != expected:
                wrong.append(expected)
        tasks = [client.submit("demo.echo", {"n": n}) for n in range(200)]
        wrong.extend(n for n, task in enumerate(tasks) if task.result(DEADLINE)["n"] != n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_threads_that_wait_are_woken_one_by_one_whoever_drives(supervisor, client):
    supervisor.finishes = False
    tasks = [client.submit("demo.echo", {"n": n}) for n in range(20)]
    client.flush(DEADLINE)
    threads = [threading.Thread(target=task.result, args=(DEADLINE,)) for task in tasks]
    for thread in threads:
        thread.start()
    for task, thread in zip(tasks, threads, strict=True):
        supervisor.send_later(Results([Outcome(task.id, SUCCEEDED)]))
        thread.join(DEADLINE)
        assert not thread.is_alive()


def test_a_thread_that_gives_up_hands_over_to_those_who_wait(supervisor, client):
    supervisor.finishes = False
    task = client.submit("demo.echo", {"n": 1})
    results = []
    followers = [
        threading.Thread(target=lambda: results.append(task.result(DEADLINE))) for _ in range(3)
    ]
    with pytest.raises(TimeoutError):
        task.result(0.01)
    for thread in followers:
        thread.start()
    for _ in range(20):
        with pytest.raises(TimeoutError):
            task.result(0.002)
    supervisor.finish_all()
    for thread in followers:
        thread.join(DEADLINE)
    assert results == [{"n": 1}] * 3


def test_on_done_is_called_without_anybody_waiting(supervisor, client):
    done = queue.SimpleQueue[object]()
    task = client.submit("demo.echo", on_done=done.put)
    assert done.get(timeout=DEADLINE) is task
    assert task.done()
    failed = client.submit("nobody.knows", on_done=done.put)
    assert done.get(timeout=DEADLINE) is failed
    with pytest.raises(UnknownTask):
        failed.result()


def test_on_done_is_called_once_for_each_of_many_while_callers_wait(client):
    done = []
    tasks = [client.submit("demo.echo", on_done=done.append) for _ in range(500)]
    for task in tasks:
        task.result(DEADLINE)
    wait_for("all callbacks ran", lambda: len(done) >= 500)
    assert sorted(task.id for task in done) == sorted(task.id for task in tasks)


def test_an_error_in_on_done_is_logged_and_the_next_one_runs(client, caplog):
    done = queue.SimpleQueue[object]()

    def fail(task: object) -> None:
        raise ZeroDivisionError("my callback")

    with caplog.at_level(logging.ERROR, "musterd.client"):
        client.submit("demo.echo", on_done=fail).result(DEADLINE)
        task = client.submit("demo.echo", on_done=done.put)
        assert done.get(timeout=DEADLINE) is task
    assert "my callback" in caplog.text


def test_a_callback_may_use_the_client_and_a_long_one_holds_up_nobody(supervisor, client):
    chained = queue.SimpleQueue[object]()
    release = threading.Event()

    def callback(task: object) -> None:
        chained.put(client.submit("demo.echo", {"n": 2}).result(DEADLINE))
        release.wait(DEADLINE)

    client.submit("demo.echo", on_done=callback)
    assert chained.get(timeout=DEADLINE) == {"n": 2}
    for _ in range(3):
        client.submit("demo.echo")
    wait_for("they go out although it runs", lambda: len(supervisor.stored.tasks) == 5)
    release.set()


# -- the end ----------------------------------------------------------------------------------


def _open_things() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _not_more_than(before: tuple[int, int]) -> bool:
    """Tell whether nothing new is open; threads of an earlier test may have ended since."""
    return all(now <= then for now, then in zip(_open_things(), before, strict=True))


def test_close_leaves_no_descriptor_and_no_thread(supervisor):
    before = _open_things()
    for _ in range(5):
        with Client(supervisor.path) as client:
            client.submit("demo.echo", on_done=lambda task: None).result(DEADLINE)
            for _ in range(100):
                client.submit("demo.echo")
        client.close()  # a second close has no effect
    wait_for("as before", lambda: _not_more_than(before))


def test_a_client_that_never_connects_leaves_nothing(path):
    before = _open_things()
    client = Client(path, connect_timeout=0.05)
    client.submit("demo.echo")
    with pytest.raises(NotConnected):
        client.close()
    wait_for("as before", lambda: _not_more_than(before))


def test_whoever_waits_when_the_client_is_closed_gets_an_error(supervisor):
    client = Client(supervisor.path)
    supervisor.finishes = False
    task = client.submit("demo.echo")
    task.ack(DEADLINE)
    errors = queue.SimpleQueue[Exception]()

    def wait() -> None:
        try:
            task.result()
        except NotConnected as error:
            errors.put(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for("one drives, two follow", lambda: len(client._driver._followers) == 2)
    client.close()
    for thread in threads:
        thread.join(DEADLINE)
        assert "closed" in str(errors.get(timeout=DEADLINE))


def test_a_callback_may_close_the_client(supervisor):
    closed = threading.Event()
    client = Client(supervisor.path)

    def callback(task: object) -> None:
        client.close()
        closed.set()

    client.submit("demo.echo", on_done=callback)
    assert closed.wait(DEADLINE)
    with pytest.raises(NotConnected):
        client.submit("demo.echo")


def test_callbacks_of_tasks_that_ended_run_before_close_returns(supervisor):
    done = []
    with Client(supervisor.path) as client:
        tasks = [client.submit("demo.echo", on_done=done.append) for _ in range(50)]
        for task in tasks:
            task.result(DEADLINE)
    assert len(done) == 50


def test_a_fork_cannot_use_its_parents_client(client):
    client.submit("demo.echo").result(DEADLINE)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            client.submit("demo.echo")
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        client.close()  # no error: the parent's connection is not touched
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        assert "make a new one there" in pipe.read()
    assert client.submit("demo.echo", {"n": 1}).result(DEADLINE) == {"n": 1}


def test_ctrl_c_interrupts_a_wait_and_the_client_goes_on(supervisor, client):
    supervisor.finishes = False
    task = client.submit("demo.echo", {"n": 1})
    task.ack(DEADLINE)

    def interrupt() -> None:
        wait_for("the main thread waits", lambda: client._driver._driving)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        task.result(DEADLINE)
    thread.join()
    supervisor.finish_all()
    assert task.result(DEADLINE) == {"n": 1}


def test_a_program_that_forgets_to_close_still_ends(supervisor):
    program = (
        "import sys; from musterd import Client\n"
        "client = Client(sys.argv[1])\n"
        "print(client.submit('demo.echo', {'n': 1}).result(20))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, supervisor.path],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "{'n': 1}\n"), ended.stderr


# -- AsyncClient ------------------------------------------------------------------------------


def test_async_results_failures_and_rejections(supervisor):
    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            task = await client.submit("demo.echo", {"n": 1}, target="site")
            assert await task.result(DEADLINE) == {"n": 1}
            assert (await task.status(DEADLINE)).target == "site"
            with pytest.raises(TaskFailed, match="no such page"):
                await (await client.submit("demo.fail")).result(DEADLINE)
            with pytest.raises(UnknownTask):
                await (await client.submit("nobody.knows")).ack(DEADLINE)
            await client.submit("nobody.knows")
            with pytest.raises(UnknownTask):
                await client.flush(DEADLINE)
            assert await (await client.task(task.id)).result(DEADLINE) == {"n": 1}
            with pytest.raises(TaskMissing):
                await (await client.task("nowhere")).result(DEADLINE)

    asyncio.run(main())


def test_async_timeout_cancel_and_as_completed(supervisor):
    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            supervisor.finishes = False
            task = await client.submit("demo.echo", {"n": 1})
            with pytest.raises(TimeoutError, match=task.id):
                await task.result(0.05)
            doomed = await client.submit("demo.echo")
            await doomed.cancel()
            with pytest.raises(TaskCancelled):
                await doomed.result(DEADLINE)
            completed = client.as_completed([task, doomed], timeout=DEADLINE)
            assert await anext(completed) is doomed
            supervisor.finish_all()
            assert [done async for done in completed] == [task]

    asyncio.run(main())


def test_async_many_tasks_at_once(supervisor):
    async def main() -> None:
        done = []
        async with AsyncClient(supervisor.path) as client:

            async def one(n: int) -> int:
                task = await client.submit("demo.echo", {"n": n}, on_done=done.append)
                return (await task.result(DEADLINE))["n"]

            assert await asyncio.gather(*(one(n) for n in range(3_000))) == list(range(3_000))
            tasks = await client.submit_many([("demo.echo", {"n": n}) for n in range(1_500)])
            results = await asyncio.gather(*(task.result(DEADLINE) for task in tasks))
            assert [result["n"] for result in results] == list(range(1_500))
        assert len(done) == 3_000

    asyncio.run(main())
    assert len(supervisor.stored.submits) < 1_500


def test_async_map_is_bounded_and_waits_while_the_queue_is_full(supervisor, monkeypatch):
    monkeypatch.setattr(async_submit, "MAP_WINDOW", 10)
    supervisor.room = 3

    async def main() -> None:
        taken = []
        results = []

        def source() -> Iterator[dict[str, int]]:
            for n in range(40):
                taken.append(n)
                yield {"n": n}

        async with AsyncClient(supervisor.path) as client:
            async for task in client.map("demo.echo", source()):
                results.append((await task.result())["n"])
                assert len(taken) <= len(results) + 10
                supervisor.room += 1
        assert sorted(results) == list(range(40))

    asyncio.run(main())


def test_async_wait_returns_when_there_is_room(supervisor):
    supervisor.room = 0

    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            with pytest.raises(QueueFull):
                await (await client.submit("demo.echo")).ack(DEADLINE)
            submit = asyncio.create_task(client.submit("demo.echo", wait=True))
            while len(supervisor.stored.submits) < 4:
                await asyncio.sleep(0.002)
            assert not submit.done()
            supervisor.room = 1
            task = await asyncio.wait_for(submit, DEADLINE)
            assert task._acknowledged

    asyncio.run(main())


def test_async_backpressure_lets_the_loop_run(supervisor, monkeypatch):
    monkeypatch.setattr(session, "UNACKED_TASKS_MAX", 100)

    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            for _ in range(1_000):
                await client.submit("demo.echo")
                assert client._session.unacked_tasks <= 100
        assert len(supervisor.stored.tasks) == 1_000

    asyncio.run(main())


def test_async_reconnects_and_sends_again(path):
    async def main() -> None:
        first = Supervisor(path)
        first.acknowledges = first.finishes = False
        async with AsyncClient(path) as client:
            tasks = [await client.submit("demo.echo", {"n": n}) for n in range(50)]
            waiters = [asyncio.create_task(task.result(DEADLINE)) for task in tasks]
            while len(first.stored.tasks) < 50:
                await asyncio.sleep(0.002)
            first.stop()
            second = Supervisor(path, "epoch-2")
            try:
                results = await asyncio.gather(*waiters)
                assert [result["n"] for result in results] == list(range(50))
                assert all(submit.resend for submit in second.stored.submits)
            finally:
                await client.close()
                second.stop()

    asyncio.run(main())


def test_async_no_supervisor_and_refusal_are_not_connected(path):
    async def main() -> None:
        client = AsyncClient(path, connect_timeout=0.1)
        task = await client.submit("demo.echo")
        with pytest.raises(NotConnected, match="no such socket"):
            await task.result()
        with pytest.raises(NotConnected):
            await client.close()
        supervisor = Supervisor(path)
        supervisor.refuses = "too old"
        try:
            client = AsyncClient(path)
            with pytest.raises(NotConnected, match="too old"):
                await (await client.submit("demo.echo")).result(DEADLINE)
            with pytest.raises(NotConnected):
                await client.close()
        finally:
            supervisor.stop()

    asyncio.run(main())


def test_async_close_leaves_nothing_and_wakes_whoever_waits(supervisor):
    async def main() -> None:
        supervisor.finishes = False
        before = _open_things()
        async with AsyncClient(supervisor.path) as client:
            task = await client.submit("demo.echo")
            await task.ack(DEADLINE)
            waiter = asyncio.create_task(task.result())
            await asyncio.sleep(0)
        with pytest.raises(NotConnected, match="closed"):
            await waiter
        with pytest.raises(NotConnected, match="closed"):
            await client.submit("demo.echo")
        await client.close()
        wait_for("as before", lambda: _not_more_than(before))

    asyncio.run(main())


def test_async_an_error_inside_is_not_replaced(supervisor, caplog):
    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            await client.submit("nobody.knows")
            raise KeyError("mine")

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert "leaving the client" in caplog.text


def test_async_an_error_in_on_done_is_logged(supervisor, caplog):
    def fail(task: object) -> None:
        raise ZeroDivisionError("my callback")

    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            await (await client.submit("demo.echo", on_done=fail)).result(DEADLINE)
            await asyncio.sleep(0)

    asyncio.run(main())
    assert "my callback" in caplog.text


def test_async_on_done_is_awaited_also_by_close(supervisor, caplog):
    done = []

    async def callback(task: AsyncTaskHandle) -> None:
        await asyncio.sleep(0.05)
        done.append(await task.result())

    async def fail(task: AsyncTaskHandle) -> None:
        await asyncio.sleep(0)
        raise ZeroDivisionError("my coroutine")

    async def main() -> None:
        async with AsyncClient(supervisor.path) as client:
            tasks = [await client.submit("demo.echo", {"n": n}, on_done=callback) for n in range(5)]
            tasks += await client.submit_many([("demo.echo", {"n": 5}, {"on_done": callback})])
            tasks.append(await client.submit("demo.echo", on_done=fail))
            for task in tasks:
                await task.result(DEADLINE)
        assert sorted(value["n"] for value in done) == list(range(6))

    asyncio.run(main())
    assert "my coroutine" in caplog.text


def test_async_on_done_may_close_its_client(supervisor):
    async def main() -> None:
        client = AsyncClient(supervisor.path)
        closed = asyncio.Event()

        async def callback(task: AsyncTaskHandle) -> None:
            await client.close()
            closed.set()

        await client.submit("demo.echo", on_done=callback)
        await asyncio.wait_for(closed.wait(), DEADLINE)

    asyncio.run(main())


def test_a_coroutine_that_on_done_of_a_client_returns_is_an_error_in_the_log(client, caplog):
    async def coroutine(task: TaskHandle) -> None:
        raise AssertionError("nobody can run it")

    def callback(task: TaskHandle) -> object:  # does not look like a coroutine function
        return coroutine(task)

    done = queue.SimpleQueue()
    client.submit("demo.echo", on_done=callback)
    client.submit("demo.echo", on_done=done.put)
    done.get(timeout=DEADLINE)
    assert "use AsyncClient" in caplog.text


def test_an_async_client_belongs_to_one_loop(supervisor):
    client = AsyncClient(supervisor.path)

    async def use() -> None:
        await (await client.submit("demo.echo")).result(DEADLINE)

    asyncio.run(use())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(use())
    asyncio.run(client.close())
