"""The scheduler of a node: follows the applied policy, and runs the schedules of the cluster.

Pure: `handle(now_ns, event)`. Every node does this, and one of them is enough.

    policy      fetched when a heartbeat names another version, and told to the supervisor
    schedules   the engine says which are due, with its own time; what to run is computed here as a
                daemon does it for its own (core/model/runs.py); `settle` submits the runs and moves
                on, in one transaction. Its `turn` lets one node win: whoever dies before has
                settled nothing, whoever comes later finds another turn.
    results     of runs are judged, and changes told (results.py)

A node settles the schedules of tasks that its own code has: it knows which argument names the site.
Schedules of tasks that no live node has wait, and `catch_up` decides about their instants.
"""

from collections import deque
from collections.abc import Callable, Iterable
from random import Random

import msgspec
from msgspec import Struct, structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire import node_messages as wire
from musterd.ipc.wire.messages import BATCH_BYTES_MAX, TaskDeclaration
from musterd.supervisor.cluster import engine
from musterd.supervisor.cluster.calls import Calls, Lane, Wanted, due_times, make_due
from musterd.supervisor.cluster.results import Results
from musterd.supervisor.cluster.sidecar_events import (
    Call,
    EngineAnswered,
    EngineFailed,
    Leave,
    Standing,
    Tell,
)
from musterd.supervisor.core.model import actions, events
from musterd.supervisor.core.model.policy import SCHEDULES_MAX, SchedulePolicy
from musterd.supervisor.core.model.runs import (
    Way,
    due_runs,
    hastened_why,
    is_set_back,
    plan_name,
    run_spec,
    set_back_why,
    way_of,
)
from musterd.supervisor.core.model.shared import ClusterPolicy, schedule_of
from musterd.supervisor.core.model.timing import ZoneOf

DUE_NS = SECOND_NS // 2  # between two looks at what is due
WITH_CHANGES = 2  # of PolicyView.scheduled
REPORT_GAP_NS = 60 * SECOND_NS  # between two reports about skipped runs of one schedule

Action = Call | Tell | actions.Report


class Memory(Struct, array_like=True, frozen=True):
    """What the nodes remember of a schedule, in DueSchedule.memory."""

    plan: str = ""  # task and timing: another plan begins anew
    turn: int = 0  # how often instants may have come again: part of the ids, so that none repeats
    why: str = ""  # why a run was skipped last


class Settlement(Struct, frozen=True):
    """What to do about a due schedule."""

    last_ns: int
    next_ns: int | None
    memory: Memory
    runs: tuple[engine.Run, ...] = ()
    skipped: int = 0
    why: str = ""
    anew: bool = False
    reset: str = ""  # why it begins anew, if people want to know
    way: Way = "begins"  # what becomes of runs that wait for a retry


def settlement(
    due: engine.DueSchedule, policy: SchedulePolicy, site: str, rng: Random
) -> Settlement | None:
    """Return what to do about a due schedule; None: wait for its last run."""
    memory = memory_of(due)
    if not policy.enabled:
        return Settlement(0, None, memory)  # instants meanwhile are not caught up with
    plan, timing = plan_name(policy), policy.timing
    ahead_ns = due.last_ns - due.now_ns
    set_back = is_set_back(policy, ahead_ns)
    if not due.last_ns or memory.plan != plan or set_back:
        again = memory.plan != "" and (memory.plan != plan or ahead_ns > 0)
        turn = memory.turn + again
        reset = set_back_why(ahead_ns) if set_back else ""
        next_ns = timing.next_after(due.now_ns)
        anew = memory.plan != plan
        return Settlement(due.now_ns, next_ns, Memory(plan, turn), anew=anew, reset=reset)
    next_ns = timing.next_after(due.last_ns)
    if next_ns is None or next_ns > due.now_ns:  # it was resumed, or something else has changed
        return Settlement(due.last_ns, next_ns, memory)
    alive, asked = bool(due.alive), bool(due.asked)
    way = way_of(policy, alive=alive, retrying=due.retrying, asked=asked)
    if way == "waits":
        return None
    found = due_runs(policy, due.last_ns, due.now_ns)
    instants, skipped, why = found.instants, found.left_out, found.why
    last_ns = found.newest_ns
    if not instants:
        way = "left out"
    elif way == "left out":
        instants, skipped, why = (), skipped + 1, f"run {due.alive} has not ended"
    elif way == "hastens":
        instants, skipped, why = (), skipped + 1, hastened_why(due.asked)
    elif policy.catch_up == "all" and not policy.overlap:
        instants = instants[:1]  # the next run follows when this one has ended
        last_ns = instants[0]
    if skipped:
        memory = structs.replace(memory, why=why[: wire.NEWS_CHARS_MAX])
    runs = tuple(
        [
            engine.Run(
                instant_ns,
                run_spec(
                    policy,
                    instant_ns,
                    memory.turn,
                    site=site,
                    delay_ns=rng.randint(0, policy.jitter_ns),
                ),
            )
            for instant_ns in instants
        ]
    )
    return Settlement(last_ns, timing.next_after(last_ns), memory, runs, skipped, why, way=way)


def run_by_hand(due: engine.DueSchedule, policy: SchedulePolicy, site: str) -> engine.Run:
    """Return a run of this moment, which settles no instant."""
    turn = memory_of(due).turn
    return engine.Run(due.now_ns, run_spec(policy, due.now_ns, turn, site=site, by_hand=True))


def site_of(policy: SchedulePolicy, declared: TaskDeclaration) -> str:
    """Return the site that the arguments of a schedule name, as its task declares it."""
    return policy.sites.get(declared.target, "")


def memory_of(due: engine.DueSchedule) -> Memory:
    """Return what the nodes remember of a schedule."""
    try:
        return _decode_memory(due.memory) if due.memory else Memory()
    except msgspec.DecodeError:
        return Memory()  # it begins anew


_decode_memory = msgspec.msgpack.Decoder(Memory).decode
_encode = msgspec.msgpack.Encoder().encode


class Skips(Struct):
    """Skipped runs of one schedule that were not reported yet."""

    pool: str
    count: int = 0
    why: str = ""
    reported_ns: int = 0


class Scheduler:
    def __init__(self, rng: Random, zone_of: ZoneOf) -> None:
        self._rng = rng
        self._zone_of = zone_of
        self._now_ns = 0
        self._out: list[Action] = []
        self._calls = Calls(rng)
        self._leaving = False
        # The policy: the version that is applied, and the one that the supervisor knows.
        self._version: int | None = None
        self._told: int | None = None
        self._scheduled = 0  # whether there are schedules, also those that were added
        self._declared: dict[str, TaskDeclaration] = {}  # tasks that the engine knows from here
        self._due: deque[engine.DueSchedule] = deque()
        self._settling: tuple[engine.DueSchedule, Settlement] | None = None
        self._due_at_ns = 0
        self._skips: dict[str, Skips] = {}
        self._refused: dict[str, str] = {}  # why runs were refused, until their schedules are due
        self._fetch, self._look, self._settle = Lane(), Lane(), Lane()
        self._results = Results(rng, self._call, self._tell, self._policy_of)

    def handle(self, now_ns: int, event: object) -> list[Action]:
        self._now_ns = self._results.now_ns = now_ns
        match event:
            case EngineAnswered(ticket, result):
                answered = self._calls.answered(ticket)
                if answered is not None:
                    answered(result)
            case EngineFailed():
                self._failed(event)
            case Standing(version, cards, scheduled):
                self._version = version
                self._scheduled = self._scheduled if scheduled is None else scheduled
                self._declared = {
                    f"{card.name}.{task.method}": task for card in cards for task in card.tasks
                }
            case Leave():
                self._leaving = True
            case wire.NewsTold(change):
                self._results.confirmed(change)
            case _:
                assert isinstance(event, events.Ticked), event
        make_due(self._wanted_calls(), now_ns)
        out, self._out = self._out, []
        return out

    def next_deadline(self) -> int | None:
        """Return when to come back with Ticked, if nothing happens before."""
        return min(due_times(self._wanted_calls()), default=None)

    # -- calls --------------------------------------------------------------------------------

    def _wanted_calls(self) -> Iterable[Wanted]:
        if self._version is None or self._leaving:
            return
        if self._version != self._told:
            yield self._fetch, 0, self._call_policy
        if self._due:
            yield self._settle, 0, self._call_settle
        elif self._scheduled and not self._settle.ticket:
            yield self._look, self._due_at_ns, self._call_due
        if self._scheduled == WITH_CHANGES:
            yield from self._results.wanted_calls()

    def _call(
        self,
        lane: Lane,
        answered: Callable[[object], None],
        method: str,
        *arguments: object,
        **options: object,
    ) -> None:
        call = self._calls.make(self._now_ns, lane, answered, method, *arguments, **options)
        self._out.append(call)

    def _failed(self, event: EngineFailed) -> None:
        lane = self._calls.failed(event.ticket, self._now_ns)
        if lane is self._settle:
            # Whether it happened is not known: the next look says what is due.
            self._settling = None
            self._due.clear()
        if event.refused:
            self._out.append(actions.Report("cluster.refused", "error", reason=event.reason))
            if lane is self._fetch:
                self._tell_policy(None)

    # -- the policy ---------------------------------------------------------------------------

    def _call_policy(self) -> None:
        self._call(self._fetch, self._fetched, "policy")

    def _fetched(self, result: object) -> None:
        assert isinstance(result, engine.PolicyView)
        self._version, self._scheduled = result.version, result.scheduled
        self._tell_policy(result.policy)

    def _tell_policy(self, policy: ClusterPolicy | None) -> None:
        assert self._version is not None
        self._told = self._version
        if policy is None:
            self._tell(wire.SharedPolicy(self._version))
            return
        encoded = _encode(policy)
        parts = range(0, len(encoded), BATCH_BYTES_MAX)
        for at in parts:
            part, more = encoded[at : at + BATCH_BYTES_MAX], at + BATCH_BYTES_MAX < len(encoded)
            self._tell(wire.SharedPolicy(self._version, part, more))
        self._due.clear()
        for card in policy.schedules:
            try:
                schedule_of(card.plan, self._zone_of)
            except ValueError as error:
                why = f"schedule '{card.name}' does not run here: {error}"
                self._out.append(actions.Report("cluster.refused", "error", reason=why))
        self._results.follow()

    def _tell(self, message: wire.SidecarMessage) -> None:
        self._out.append(Tell(message))

    # -- schedules ----------------------------------------------------------------------------

    def _call_due(self) -> None:
        self._due_at_ns = self._now_ns + round(DUE_NS * self._rng.uniform(0.8, 1.2))
        self._call(self._look, self._found_due, "due")

    def _found_due(self, result: object) -> None:
        assert isinstance(result, list)
        for due in result:
            policy = self._policy_of(due.plan)
            if policy is not None and policy.task in self._declared:
                self._due.append(due)
        for name, skips in list(self._skips.items()):
            self._tell_skips(name, skips)
            if not skips.count and self._now_ns - skips.reported_ns >= REPORT_GAP_NS:
                del self._skips[name]

    def _policy_of(self, plan: bytes) -> SchedulePolicy | None:
        """Return the schedule; None if it cannot be read here: another node may."""
        try:
            return schedule_of(plan, self._zone_of)
        except ValueError:
            return None

    def _call_settle(self) -> None:
        while self._due:
            due = self._due.popleft()
            policy = self._policy_of(due.plan)
            declared = self._declared.get(policy.task) if policy is not None else None
            if policy is None or declared is None:
                continue
            found = settlement(due, policy, site_of(policy, declared), self._rng)
            if found is None:
                continue
            refused = self._refused.pop(due.name, "")
            if refused and not found.skipped:
                found = structs.replace(found, memory=structs.replace(found.memory, why=refused))
            self._settling = (due, found)
            self._call(
                self._settle,
                self._settled,
                "settle",
                due,
                found.runs,
                last_ns=found.last_ns,
                next_ns=found.next_ns,
                memory=_encode(found.memory),
                skipped=found.skipped,
                anew=found.anew,
                way=found.way,
            )
            return

    def _settled(self, result: object) -> None:
        assert self._settling is not None
        (due, found), self._settling = self._settling, None
        if result is None:
            return  # another node was first, or its last run goes on: the next look tells
        assert isinstance(result, engine.Settled)
        policy = self._policy_of(due.plan)
        pool = policy.task.partition(".")[0] if policy is not None else ""
        if found.reset:
            self._tell(wire.ScheduleNews("schedule.reset", due.name, pool, reason=found.reset))
        refused = [each.rejection for each in result.verdicts if each.rejection is not None]
        if found.skipped or refused:
            skips = self._skips.setdefault(due.name, Skips(pool))
            skips.count += found.skipped + len(refused)
            skips.why = found.why
            if refused:
                skips.why = f"{refused[-1].code}: {refused[-1].message}"
                self._refused[due.name] = skips.why[: wire.NEWS_CHARS_MAX]
                if len(self._refused) > SCHEDULES_MAX:  # of schedules that were deleted
                    del self._refused[next(iter(self._refused))]
            self._tell_skips(due.name, skips)

    def _tell_skips(self, name: str, skips: Skips) -> None:
        """Report all runs skipped since the last report, at most once in REPORT_GAP_NS."""
        last_ns = skips.reported_ns
        if skips.count and (not last_ns or self._now_ns - last_ns >= REPORT_GAP_NS):
            why = skips.why[: wire.NEWS_CHARS_MAX]
            news = wire.ScheduleNews("schedule.skipped", name, skips.pool, "", why, skips.count)
            skips.count, skips.reported_ns = 0, self._now_ns
            self._tell(news)
