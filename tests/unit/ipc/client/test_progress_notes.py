"""Progress of a task, as a client hears of it."""

from musterd.ipc.client.record import TaskRecord
from musterd.ipc.client.session import Session
from musterd.ipc.wire.messages import Outcome, ProgressNote, Results


def test_the_newest_word_is_kept_and_listeners_are_told() -> None:
    session, told = Session(), []
    record = TaskRecord("t", "p.x", None)
    session.watch(record)
    record._listen(lambda each: told.append(each._note))
    first, second = ProgressNote("t", 0.1), ProgressNote("t", 0.2, "more")
    session.receive(0, first)
    session.receive(0, second)
    assert record._note is second
    assert told == [first, second]
    assert record._ending is None


def test_a_word_about_a_task_that_ended_or_was_never_ours_changes_nothing() -> None:
    session = Session()
    record = TaskRecord("t", "p.x", None)
    session.watch(record)
    session.receive(0, Results([Outcome("t", "succeeded")]))
    session.receive(0, ProgressNote("t", 0.5))
    session.receive(0, ProgressNote("other", 0.5))
    assert record._note is None
    assert not session.records
