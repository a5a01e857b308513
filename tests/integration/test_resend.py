"""Messages that a client sends right after a repeated submit find the task of that submit.

After a restart of the daemon, a client sends unacknowledged tasks again, and then its other
messages about those tasks. The daemon first looks a repeated submit up in the store; the messages
behind it must not overtake it.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from musterd.ipc.wire.codec import decode_server, encode
from musterd.ipc.wire.messages import (
    CANCELLED,
    PROTOCOL,
    SUCCEEDED,
    Cancel,
    ClientMessage,
    Hello,
    Inspect,
    Inspected,
    Missing,
    Results,
    ServerMessage,
    Submit,
    TaskSpec,
    Watch,
    Welcome,
)
from support.daemon import Muster

ID = "repeated"
WAIT_SECONDS = 20.0


def test_a_copy_that_was_under_way_when_its_client_came_again_is_not_run(jobs, waiting) -> None:
    """A relay may hold back bytes that a client sent on an abandoned connection."""
    daemon = jobs(size=1)
    context = zmq.Context()
    try:
        late, present = (dealer_of(context, daemon) for _ in range(2))
        assert talk(late, Hello(PROTOCOL, session="mine"), Welcome)
        late_copy = Submit(1, [TaskSpec(ID, "jobs.echo", b"\x80")])
        again = Submit(1, late_copy.tasks, resend=True)
        assert talk(present, Hello(PROTOCOL, session="mine"), Welcome)
        assert talk(present, again, Results).outcomes[0].state == SUCCEEDED
        late.send(encode(late_copy))
        assert talk(late, Hello(PROTOCOL), Welcome), "on a connection of its own by now"
        waiting(
            "what the daemon was sent is dealt with", lambda: talk(present, Watch([ID]), Results)
        )
    finally:
        context.destroy(linger=0)
    assert daemon.stop() == 0
    assert daemon.log().count("event=task.succeeded") == 1


def dealer_of(context: Any, daemon: Muster) -> Any:
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"ipc://{daemon.tasks_socket}")
    return dealer


def talk(dealer: Any, message: ClientMessage, kind: type[Any]) -> Any:
    """Send the message; return the first answer of that kind."""
    dealer.send(encode(message))
    while dealer.poll(WAIT_SECONDS * 1000):
        answer = decode_server(dealer.recv())
        if isinstance(answer, kind):
            return answer
    pytest.fail(f"no {kind.__name__} within {WAIT_SECONDS} s")


@pytest.fixture
def ask(jobs) -> Iterator[Callable[[int, ClientMessage], Iterator[ServerMessage]]]:
    """Send a message right after a repeated submit; yield the answers: ask(delay_ns, message)."""
    daemon = jobs(size=1)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(f"ipc://{daemon.tasks_socket}")

    def send(delay_ns: int, message: ClientMessage) -> Iterator[ServerMessage]:
        submit = Submit(1, [TaskSpec(ID, "jobs.echo", b"\x80", delay_ns=delay_ns)], resend=True)
        for each in (Hello(PROTOCOL), submit, message):
            dealer.send(encode(each))
        deadline = time.monotonic() + WAIT_SECONDS
        while dealer.poll(max(0.0, deadline - time.monotonic()) * 1000):
            yield decode_server(dealer.recv())
        pytest.fail(f"nothing more came within {WAIT_SECONDS} s")

    yield send
    dealer.close()
    context.term()


def test_a_cancel_behind_a_repeated_submit_cancels_it(ask):
    results = (each for each in ask(10**12, Cancel([ID])) if isinstance(each, Results))
    assert [outcome.state for outcome in next(results).outcomes] == [CANCELLED]


def test_a_question_behind_a_repeated_submit_finds_it(ask):
    answers = (each for each in ask(10**9, Inspect(7, ID)) if isinstance(each, Inspected))
    view = next(answers).view
    assert view is not None, "it was said not to exist"
    assert view.id == ID


def test_a_watch_behind_a_repeated_submit_is_not_told_that_it_is_missing(ask):
    for answer in ask(10**8, Watch([ID])):
        assert not isinstance(answer, Missing)
        if isinstance(answer, Results):
            assert [outcome.state for outcome in answer.outcomes] == [SUCCEEDED]
            break
