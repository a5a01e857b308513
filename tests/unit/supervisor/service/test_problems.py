"""Problems of the daemon: shown while they last, told when they come and go."""

from musterd.supervisor.core.model.actions import Report
from musterd.supervisor.service.problems import OFTEN_NS, Problem, Problems


class Source:
    def __init__(self) -> None:
        self.problem = ""

    def __call__(self) -> str:
        return self.problem


def test_a_problem_is_told_when_it_comes_and_when_it_goes() -> None:
    disk, door = Source(), Source()
    problems = Problems(
        Problem(disk, "store.failing", "store.recovered"),
        Problem(door, "door.shut", "door.open", "warning"),
    )
    assert (problems.look(0), problems.text) == ([], "")
    disk.problem = "full"
    assert problems.look(1) == [Report("store.failing", "error", reason="full")]
    door.problem = "shut"
    assert problems.look(2) == [Report("door.shut", "warning", reason="shut")]
    assert problems.look(3) == []
    assert problems.text == "full; shut"
    disk.problem = door.problem = ""
    assert problems.look(4) == [Report("store.recovered"), Report("door.open")]
    assert problems.text == ""


def test_what_comes_and_goes_all_the_time_is_told_once_a_minute() -> None:
    door = Source()
    problems = Problems(Problem(door, "door.shut", "door.open", gap_ns=OFTEN_NS))
    told = []
    for now_ns in range(0, 2 * OFTEN_NS, OFTEN_NS // 60):
        door.problem = "" if door.problem else "shut"
        told += [report.event for report in problems.look(now_ns)]
    assert told == ["door.shut", "door.open"] * 2


def test_one_that_came_too_soon_to_be_told_is_told_if_it_lasts() -> None:
    clock = Source()
    problems = Problems(Problem(clock, "clock.doubted", "clock.trusted", gap_ns=OFTEN_NS))
    clock.problem = "a year ahead"
    assert problems.look(0) == [Report("clock.doubted", "error", reason="a year ahead")]
    clock.problem = ""
    assert problems.look(1) == [Report("clock.trusted")]
    clock.problem = "a year ahead"
    assert problems.look(2) == []
    assert problems.look(OFTEN_NS) == [Report("clock.doubted", "error", reason="a year ahead")]
    assert problems.look(2 * OFTEN_NS) == [], "once"
    clock.problem = ""
    assert problems.look(2 * OFTEN_NS + 1) == [Report("clock.trusted")]


def test_a_problem_that_never_is_over_is_told_once() -> None:
    lost = Source()
    problems = Problems(Problem(lost, "sockets.lost", ""))
    lost.problem = "gone"
    assert len(problems.look(0)) == 1
    lost.problem = ""
    assert problems.look(1) == []
