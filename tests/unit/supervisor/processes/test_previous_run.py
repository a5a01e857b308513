"""Processes and directories that outlived a worker are counted and told to people."""

from pathlib import Path

from musterd.supervisor.core.model import actions, events
from musterd.supervisor.processes.previous_run import RunRecord
from support.core import Muster


def test_leftovers_are_counted_by_pool_and_reported_with_their_slot(muster: type[Muster]) -> None:
    m = muster(size=2)
    m.start()
    (report,) = m.tell(events.LeftoversEnded("p", 1, 3, 0))
    assert report == actions.Report(
        "worker.leftovers",
        "warning",
        pool="p",
        worker="p/1",
        reason="processes: 3, temporary directories: 0",
    )
    m.tell(events.LeftoversEnded("p", -1, 2, 1))  # left by the fork server
    assert m.fleet.pools["p"].counters.orphans == 5


def test_directories_alone_are_no_warning(muster: type[Muster]) -> None:
    m = muster()
    (report,) = m.tell(events.LeftoversEnded("p", 0, 0, 1))
    assert (report.event, report.level) == ("worker.leftovers", "info")


def test_what_an_earlier_supervisor_left_is_nobody_s_fault(muster: type[Muster]) -> None:
    m = muster()
    (report,) = m.tell(events.LeftoversEnded("", -1, 4, 2))
    assert (report.event, report.level, report.pool) == ("daemon.leftovers", "warning", "")
    assert m.fleet.pools["p"].counters.orphans == 0


def test_leftovers_of_a_slot_that_is_gone_are_reported_for_its_pool(muster: type[Muster]) -> None:
    m = muster(size=1)
    (report,) = m.tell(events.LeftoversEnded("p", 9, 1, 0))
    assert (report.pool, report.worker) == ("p", "")


def test_a_start_that_could_not_be_written_down_is_so_later(tmp_path: Path) -> None:
    note = tmp_path / "tmp.run"
    draft = tmp_path / "tmp.run.new"
    draft.mkdir()  # prevents the write, as a full disk does
    run_record = RunRecord(note)
    assert "Is a directory" in run_record.note()
    draft.rmdir()
    assert run_record.note() == ""
    assert note.exists()
    note.unlink()
    assert (run_record.note(), note.exists()) == ("", False), "once is enough"
    run_record.close()


def test_a_note_that_cannot_be_read_does_not_end_the_start(tmp_path: Path) -> None:
    note = tmp_path / "tmp.run"
    note.mkdir()
    run_record = RunRecord(note)
    assert run_record.former.processes == 0
