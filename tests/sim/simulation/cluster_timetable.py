"""Schedules of a simulated cluster: each due time is run once, whoever dies.

`steady` runs at each instant, also late ones and beside each other; in some worlds it is put at run
time. `single` waits for its last run, and leaves out what it missed. Each of its results is another
one, so each is a change: none is lost, and none is told twice as new. A run of it that waits for a
retry ends for the next one, or is attempted in its place if a person asked for it: such a run never
ends for another one. At each instant an attempt begins, or was under way when it was looked at.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from musterd.ipc.wire.messages import CANCELLED, UNKNOWN_TASK
from musterd.supervisor.cluster.added import added
from musterd.supervisor.cluster.engine import DueSchedule, Run, ScheduleCard, Settled
from musterd.supervisor.cluster.scheduler import run_by_hand
from musterd.supervisor.cluster.watching import CHANGED, RECOVERED, STALE, SeenRun
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.policy import SchedulePolicy, WatchPolicy
from musterd.supervisor.core.model.shared import card_of
from musterd.supervisor.core.model.timing import Every
from musterd.supervisor.core.model.watching import UNTOLD_MAX
from simulation.profile import METHODS, MS, SEC

if TYPE_CHECKING:
    from simulation.cluster import ClusterWorld

STEADY_NS, SINGLE_NS = 700 * MS, 300 * MS
STALE_AFTER = WatchPolicy().stale


class Timetable:
    def __init__(self, world: ClusterWorld, *, used: bool) -> None:
        self._world = world
        self.used = used
        self.begun_ns: dict[str, int] = {}  # the instant from which on each must run
        self.instants: dict[str, dict[int, str]] = {}  # of each schedule: its runs
        self.refused: dict[int, None] = {}
        self.puts = used and world.puts
        self.deleted: dict[str, None] = {}
        self.lost_races = 0
        self.asked: dict[str, None] = {}  # runs of `single` that a person asked for
        self.asked_in_vain = 0  # refused
        self.hastened = self.replaced = 0
        self.is_paused = False
        self.ended: list[SeenRun] = []  # of `single`, in the order of their ends
        # Changes and other news by their numbers in the cluster: how often they were told as new,
        # and how often as perhaps told before.
        self.told: dict[int, list[int]] = {}
        self.retold = 0

    @property
    def cards(self) -> tuple[ScheduleCard, ...]:
        if not self.used:
            return ()
        cards = (card_of(self._steady), card_of(self._single))
        return cards[1:] if self.puts else cards

    @property
    def _task(self) -> str:
        return f"{self._world.pool}.{METHODS[0]}"

    @property
    def _steady(self) -> SchedulePolicy:
        every = Every(STEADY_NS)
        return SchedulePolicy("steady", self._task, every, overlap=True, catch_up="all")

    @property
    def _single(self) -> SchedulePolicy:
        return SchedulePolicy("single", self._task, Every(SINGLE_NS), notify=True)

    def plan(self) -> None:
        """Put a schedule at run time, in some worlds; and another one that is deleted soon."""
        how = Random(self._world.seed)
        for _ in range(how.randrange(60) if self.used else 0):
            self._world.after(how.randrange(8 * SEC), self._ask)
        if not self.puts:
            return
        self._world.after(how.randrange(3 * SEC), self._put, [self._steady], how)
        brief = SchedulePolicy("brief", self._task, Every(SINGLE_NS))
        at_ns = how.randrange(3 * SEC)
        self._world.after(at_ns, self._put, [brief], how)
        self._world.after(at_ns + how.randrange(2 * SEC), self._delete, "brief")

    def _put(self, policies: list[SchedulePolicy], how: Random) -> None:
        schedules = added([(policy, b"") for policy in policies], how)
        assert self._world.engine.put(schedules) == []

    def _ask(self) -> None:
        """Ask for a run of `single`, unless one is alive."""
        [view] = self._world.engine.schedules("single")
        if view.due.alive or self.is_paused:
            return
        run = run_by_hand(view.due, self._single, "")
        moved = {"last_ns": view.due.last_ns, "next_ns": view.next_ns, "memory": view.due.memory}
        result = self._world.engine.settle(view.due, [run], **moved)
        assert result is not None
        if result.verdicts[0].state == "accepted":
            self.asked[run.spec.id] = self._world.accepted[run.spec.id] = None
        else:
            self.asked_in_vain += 1

    def _delete(self, name: str) -> None:
        assert self._world.engine.delete([name]) == []
        self.deleted[name] = None

    def settled(self, due: DueSchedule, runs: list[Run], result: Settled | None) -> None:
        """A node has settled a schedule, or was too late; the engine has the effect already."""
        if result is None:
            self.lost_races += 1
            return
        world = self._world
        known = self.instants.setdefault(due.name, {})
        self.begun_ns.setdefault(due.name, due.last_ns or due.now_ns)
        assert due.name not in self.deleted, f"{due.name} is settled after it was deleted"
        if due.name == "single":
            self._check_last(due, runs)
        for run, verdict in zip(runs, result.verdicts, strict=True):
            assert run.instant_ns not in known, f"{due.name} runs twice for {run.instant_ns}"
            if verdict.rejection is not None:  # the last pool with this task is just leaving
                assert verdict.rejection.code == UNKNOWN_TASK, verdict
                self.refused[run.instant_ns] = None
                continue
            assert verdict.state == "accepted", verdict
            known[run.instant_ns] = run.spec.id
            world.accepted[run.spec.id] = None

    def _check_last(self, due: DueSchedule, runs: list[Run]) -> None:
        """Check that no run is made beside another one, and that none rests at a due time."""
        board = self._world.engine.board
        alive = [each for id_, each in board.live.items() if id_.startswith("@single.")]
        made = [run.spec.id for run in runs if run.spec.id in board.live]
        before = [each.spec.id for each in alive if each.spec.id not in made]
        assert not (made and before), f"{made} are submitted beside {before}"
        if board.schedules["single"].last_ns > due.last_ns > 0 and due.retrying and alive:
            resting = [each.spec.id for each in alive if each.retrying]
            assert len(resting) < len(alive), f"{resting} rest, and a run was due"
        self.replaced += due.retrying and not due.asked and bool(made)
        self.hastened += due.retrying and bool(due.asked)

    # -- results ------------------------------------------------------------------------------

    @property
    def all_told(self) -> bool:
        """Whether every run is judged, and people were alerted of all that this has found."""
        board = self._world.engine.board
        return not board.seen and all(each.number in board.told for each in board.changes)

    def reported(self, event: events.ScheduleNoted) -> None:
        """A supervisor reports news of a schedule's results, and alerts people of it."""
        if event.change:
            told = self.told.setdefault(event.change, [0, 0])
            told[event.again] += 1
            self.retold += event.again
            assert told[0] <= 1, f"{event} is told twice as new"

    def check_results(self) -> None:
        """Check that each result was compared with the one before, and that all was told."""
        board = self._world.engine.board
        expected, before, failures = [], "", 0
        for run in self.ended:
            if run.kind == "anew":
                before = ""
            elif run.kind == "failed":
                failures += 1
                if failures == STALE_AFTER:
                    expected.append((STALE, run.task, ""))
            else:
                if failures >= STALE_AFTER:
                    expected.append((RECOVERED, run.task, ""))
                failures = 0
                if before:
                    expected.append((CHANGED, run.task, before))
                before = run.task
        kept = board.history.get("single", {})
        assert [each[:2] for each in expected] == [
            (each.event, each.task) for each in board.changes
        ]
        for (_, task, former), note in zip(expected, board.changes, strict=True):
            if note.entry in kept and note.before in kept:
                assert (kept[note.before].task, kept[note.entry].task) == (former, task)
        assert len(kept) <= WatchPolicy().keep + UNTOLD_MAX
        for note in board.changes:
            assert sum(self.told.get(note.number, ())) >= 1, f"{note} was told by nobody"

    def pause(self) -> None:
        """Let nothing more run; what is due is settled or not, and stays so."""
        self.is_paused = True
        for view in self._world.engine.schedules():
            self._world.engine.pause(view.due.name, paused=True)

    def check(self) -> None:
        """Check that no instant of `steady` is missing, and that all others are counted."""
        for id_ in self.asked:
            assert self._world.finals[id_] != CANCELLED, f"{id_} ended for another run"
        for view in self._world.engine.schedules():
            name, runs = view.due.name, self.instants.get(view.due.name, {})
            if name not in self.begun_ns:
                continue
            every_ns = STEADY_NS if name == "steady" else SINGLE_NS
            due = range(self.begun_ns[name] + every_ns, view.due.last_ns + 1, every_ns)
            missing = [instant_ns for instant_ns in due if instant_ns not in runs]
            single = name == "single"
            assert view.runs == len(runs) + len(self.asked) * single, (name, view)
            assert runs.keys() <= {*due}, f"{name} runs at other times"
            skipped = view.skipped - self.asked_in_vain * single
            assert len(missing) == skipped, f"{name} did not run for {missing}: {view}"
            unsaid = [each for each in missing if each not in self.refused]
            assert name != "steady" or not unsaid, f"{name} did not run for {unsaid}"
