"""The engine in memory: the contract as plain code, for tests and the simulation.

It is pure: the clock and the random generator are handed in. It is what the engine on PostgreSQL is
compared with, so it is written to be read, not to be fast: a claim sorts what is queued.
"""

from collections.abc import Callable, Sequence
from random import Random

from musterd.ipc.wire.messages import HIGH, LOW, QUEUED, RUNNING, Outcome
from musterd.supervisor.cluster.engine import (
    AGING_TURN,
    ENDED_MAX,
    MARKS_MAX,
    PROGRESS_GAP_NS,
    Cards,
    ClusterPolicy,
    End,
    Ended,
    Fenced,
    Fetched,
    Grant,
    Held,
    Joined,
    NameTaken,
    NodeCard,
    NodeSeen,
    NodeView,
    Orders,
    PolicyChanged,
    PolicyView,
    Reaped,
    Statistics,
    Told,
    Want,
)
from musterd.supervisor.cluster.handling import (
    LockAsk,
    LockView,
    ProgressMark,
    StateAsk,
    StateView,
)
from musterd.supervisor.cluster.model_records import (
    JOINED,
    LaneKey,
    Lock,
    Node,
    Pool,
    Task,
)
from musterd.supervisor.cluster.model_schedules import Schedules


class ModelEngine(Schedules):
    def __init__(self, clock: Callable[[], int], rng: Random, *, wall_ns: int = 0) -> None:
        super().__init__(clock, rng, wall_ns)
        self._tenure = 0
        self._version = 0
        self._epoch = 1
        self._lanes: dict[LaneKey, int] = {}  # numbers: their order is the ring
        self._cursor: dict[tuple[str, int], int] = {}
        self._progress_ns: dict[str, int] = {}

    # -- nodes --------------------------------------------------------------------------------

    def join(self, card: NodeCard) -> Joined:
        now_ns = self.clock()
        self._refuse_name(card)
        former = self.board.nodes.get(card.identity)
        if former is not None and former.tenure:
            if former.card.name != card.name:  # a copy of another machine, maybe
                why = f"the identity in node.id is taken by node '{former.card.name}'"
                raise NameTaken(why, now_ns - former.beat_ns)
            self._end_tenure(former)
        self._tenure += 1
        draining = former.draining if former is not None else False
        node = Node(card, self._tenure, now_ns, str(self._epoch), draining)
        self.board.nodes[card.identity] = node
        self._declare(card)
        return Joined(self._tenure, str(self._epoch), self._version)

    def _refuse_name(self, card: NodeCard) -> None:
        for other in self.board.nodes.values():
            same = other.card.name == card.name and other.card.identity != card.identity
            if same and other.tenure:  # its lease may be over, and the node back
                age_ns = self.clock() - other.beat_ns
                raise NameTaken(f"the name '{card.name}' is taken by another node", age_ns)

    def _declare(self, card: NodeCard) -> None:
        for pool in card.pools:
            known = self.board.pools.setdefault(pool.name, Pool(pool))
            known.card = pool

    def redeclare(self, tenure: int, card: NodeCard) -> None:
        node = self._node(tenure)
        self._refuse_name(card)
        node.card = card
        self._declare(card)

    def _alive(self, node: Node) -> bool:
        return bool(node.tenure) and self.clock() < node.beat_ns + node.card.lease_ns

    def _node(self, tenure: int) -> Node:
        node = self.board.of(tenure) if tenure else None
        if node is None:
            raise Fenced(f"tenure {tenure} is over")
        return node

    def restart(self, *, lost: Sequence[str] = ()) -> None:
        """Be a server that crashed: a new epoch, and these tasks' claims are forgotten."""
        self._epoch += 1
        for id_ in lost:
            task = self.board.live[id_]
            task.state, task.tenure, task.claim = QUEUED, 0, 0
            task.attempt -= 1

    def rejoin(self, tenure: int, running: Sequence[Held]) -> list[str]:
        node = self._node(tenure)
        node.beat_ns, node.epoch = self.clock(), str(self._epoch)
        lost = []
        for held in running:
            task = self.board.live.get(held.id)
            if task is not None and task.state == QUEUED:
                task.state, task.tenure, task.claim = RUNNING, tenure, held.claim
                task.attempt += 1
                task.begun = task.ran = True
            elif task is None or (task.tenure, task.claim) != (tenure, held.claim):
                lost.append(held.id)
        has = {(held.id, held.claim) for held in running}
        for task in list(self.board.claimed()):
            if task.tenure == tenure and (task.spec.id, task.claim) not in has:
                self.node_lost(task)  # granted in an answer that never arrived
        return lost

    def release(self, tenure: int, known: Sequence[Held]) -> int:
        self._node(tenure)
        pairs = {(held.id, held.claim) for held in known}
        unknown = [
            task
            for task in self.board.claimed()
            if task.tenure == tenure and (task.spec.id, task.claim) not in pairs
        ]
        for task in unknown:
            self.attempt_ended(task, End(task.spec.id, task.claim, "untouched"))
        return len(unknown)

    def beat(self, tenure: int) -> Orders:
        node = self._node(tenure)
        node.beat_ns = self.clock()
        cancel = tuple(t.spec.id for t in self.board.claimed() if t.tenure == tenure and t.cancel)
        known = (str(self._epoch), self._version, node.draining, cancel)
        return Orders(*known, self.scheduled, tuple(self.logins()))

    def leave(self, tenure: int) -> None:
        node = self.board.of(tenure) if tenure else None
        if node is not None:
            self._end_tenure(node)

    def reap(self) -> list[Reaped]:
        reaped = []
        for node in list(self.board.nodes.values()):
            if node.tenure and not self._alive(node):
                tenure = node.tenure
                reaped.append(Reaped(node.card.name, tenure, self._end_tenure(node)))
                node.lost = True
        return reaped

    def _end_tenure(self, node: Node) -> int:
        claims = [task for task in self.board.claimed() if task.tenure == node.tenure]
        for name, line in list(self.board.locks.items()):
            self.board.locks[name] = [each for each in line if each.tenure != node.tenure]
            if not self.board.locks[name]:
                del self.board.locks[name]
        for task in claims:
            self.node_lost(task)
        node.tenure = 0
        return len(claims)

    def nodes(self) -> list[NodeView]:
        now_ns = self.clock()
        return [
            NodeView(
                node.card.identity,
                node.card.name,
                node.tenure,
                self._alive(node),
                node.draining,
                sum(task.tenure == node.tenure for task in self.board.claimed()),
                now_ns - node.beat_ns,
                node.card.software,
                node.card.pools,
                node.lost,
            )
            for node in sorted(self.board.nodes.values(), key=lambda each: each.card.name)
        ]

    def statistics(self, age_ns: int = 0) -> Statistics | None:
        nodes = tuple(
            NodeSeen(
                node.name,
                node.tenure,
                node.alive,
                node.draining,
                node.claims,
                node.beat_age_ns,
                node.software,
                tuple(sorted({pool.name for pool in node.pools if pool.tasks})),
            )
            for node in self.nodes()
        )
        backlogs = tuple(self.backlogs())
        return Statistics(counts=tuple(self.counts()), backlogs=backlogs, nodes=nodes)

    def drain(self, name: str, *, draining: bool) -> bool:
        found = [node for node in self.board.nodes.values() if node.card.name == name]
        for node in found:
            node.draining = draining
        return bool(found)

    def cards(self, seen: str = "") -> Cards | None:
        nodes = sorted(self.board.nodes.values(), key=lambda each: each.card.name)
        cards = tuple(node.card for node in nodes)
        stamp = repr(cards)
        return Cards(stamp, cards) if stamp != seen else None

    def forget(self, name: str, *, force: bool = True) -> bool:
        found = [each for each in self.board.nodes.values() if each.card.name == name]
        found = [each for each in found if force or not self._alive(each)]
        for node in found:
            if node.tenure:
                self._end_tenure(node)
            del self.board.nodes[node.card.identity]
        return bool(found)

    # -- claims -------------------------------------------------------------------------------

    def claim(self, tenure: int, wants: Sequence[Want]) -> list[Grant]:
        node = self._node(tenure)
        epochs = {each.epoch for each in self.board.nodes.values() if self._alive(each)}
        if node.draining or (epochs | {node.epoch}) - {str(self._epoch)}:
            return []
        held = (tenure, self.rng.getrandbits(62) + 1)
        granted: list[Task] = []
        for want in wants:
            pool = self.board.pools.get(want.pool)
            if pool is None:
                continue
            left = want.count
            aged = (pool.grants % AGING_TURN + left) // AGING_TURN
            for level in range(LOW, HIGH - 1, -1):
                if aged <= 0:
                    break
                older_ns = self.clock() - pool.card.aging_ns
                taken = self._take(held, want, level, aged, older_ns)
                granted += taken
                aged, left = aged - len(taken), left - len(taken)
            for level in range(LOW + 1):
                taken = self._take(held, want, level, left, None)
                granted += taken
                left -= len(taken)
            pool.grants += want.count - left
        return [self._grant(task) for task in granted]

    def _take(
        self, held: tuple[int, int], want: Want, level: int, wanted: int, older_ns: int | None
    ) -> list[Task]:
        """Take tasks of one level, lane after lane from where the ring stands."""
        taken: list[Task] = []
        while len(taken) < wanted:
            lanes = self._ring(want, level, older_ns)
            before = len(taken)
            share = max(1, (wanted - len(taken)) // max(1, len(lanes)))
            for number, tasks in lanes:
                for task in tasks[: min(share, wanted - len(taken))]:
                    if not self._admits(task):
                        break
                    self._begin(task, held)
                    taken.append(task)
                    self._cursor[want.pool, level] = number
            if len(taken) == before:
                break
        return taken

    def _ring(self, want: Want, level: int, older_ns: int | None) -> list[tuple[int, list[Task]]]:
        """Return the lanes with something for this node, the one whose turn it is first."""
        now_ns = self.clock()
        lanes: dict[int, list[Task]] = {}
        for task in sorted(self.board.queued(want.pool), key=lambda each: each.seq):
            number = self._lanes.setdefault(task.lane, len(self._lanes) + 1)
            if task.level != level or task.spec.name not in want.names:
                continue
            if task.expires_ns and task.expires_ns <= now_ns:
                continue
            if older_ns is None or task.queued_ns <= older_ns:
                lanes.setdefault(number, []).append(task)
        cursor = self._cursor.get((want.pool, level), 0)
        return sorted(lanes.items(), key=lambda lane: (lane[0] <= cursor, lane[0]))

    def _admits(self, task: Task) -> bool:
        if task.spec.session and not self.admits_session(task):
            return False
        limit = self.class_limit(task.class_)
        if limit and sum(t.class_ == task.class_ for t in self.board.claimed()) >= limit:
            return False
        if not task.spec.target:
            return True
        return self.site_of(task).allows(self.clock(), self.inside(task.spec.target)) > 0

    def _begin(self, task: Task, held: tuple[int, int]) -> None:
        if task.spec.target:
            task.probe = self.site_of(task).enter(self.clock(), first=not task.earned)
            task.earned = True
        task.state = RUNNING
        task.tenure, task.claim = held
        task.attempt += 1
        task.ran = True

    def _grant(self, task: Task) -> Grant:
        left_ns = task.expires_ns - self.clock() if task.expires_ns else 0
        return Grant(
            task.spec,
            task.claim,
            task.attempt,
            task.crashes,
            task.interruptions,
            self.policy_of(task.spec) if task.spec.session else task.class_,
            task.probe != 0,
            left_ns,
            self.held(task.spec.session),
            *self.login_of(task),
        )

    def begun(self, tenure: int, claims: Sequence[Held]) -> None:
        for task in self._held(tenure, claims):
            task.begun = True

    def _held(self, tenure: int, claims: Sequence[Held]) -> list[Task]:
        found = []
        for held in claims:
            task = self.board.live.get(held.id)
            if task is None or task.state != RUNNING:
                continue
            if (task.tenure, task.claim) == (tenure, held.claim):
                found.append(task)
        return found

    def finish(self, tenure: int, ends: Sequence[End]) -> list[Told]:
        told: list[Told] = []
        for end in ends:
            for task in self._held(tenure, [Held(end.id, end.claim)]):
                told += self.attempt_ended(task, end)
        self.begin_logins()
        return told

    # -- for those who wait, and for people ---------------------------------------------------

    def ended(self, waiter: int, after: str = "", limit: int = ENDED_MAX) -> Ended:
        since = int(after or 0)
        done = [
            each
            for each in self.board.done.values()
            if each.number > since and each.task.waiter == waiter and waiter
        ]
        done.sort(key=lambda each: each.number)
        told = done[:limit]
        ids = tuple(each.outcome.id for each in told)
        more = len(told) == limit
        return Ended(ids, str(told[-1].number if more else self.board.ends), more)

    def look_up(self, ids: Sequence[str]) -> list[Outcome]:
        return [self.board.done[id_].outcome for id_ in ids if id_ in self.board.done]

    def fetch(self, ids: Sequence[str], bytes_max: int) -> Fetched:
        alive = [id_ for id_ in ids if id_ in self.board.live]
        ended = [id_ for id_ in ids if id_ not in self.board.live and id_ in self.board.done]
        outcomes, size = [], 0
        for outcome in self.look_up(ended):
            size += len(outcome.value)
            if size > bytes_max:
                break
            outcomes.append(outcome)
        unread = ended[len(outcomes) :]
        known = {*alive, *ended}
        absent = [id_ for id_ in ids if id_ not in known]
        next_bytes = len(self.board.done[unread[0]].outcome.value) if unread else 0
        said = [(id_, self._leader(self.board.live[id_])) for id_ in alive]
        marks = tuple([ProgressMark(id_, w.fraction, w.text) for id_, w in said if w.said])
        return Fetched(
            tuple(outcomes), tuple(alive), tuple(absent), tuple(unread), next_bytes, marks
        )

    def _leader(self, task: Task) -> Task:
        """Return the task that runs for it: the one that it has joined, or itself."""
        if task.state != JOINED:
            return task
        return self.board.live[self.board.groups[task.spec.key].leader]

    def retain(self, keep_ns: int) -> int:
        until_ns = self.clock() - keep_ns
        old = [id_ for id_, each in self.board.done.items() if each.finished_ns < until_ns]
        for id_ in old:
            del self.board.done[id_]
        return len(old)

    # -- policy -------------------------------------------------------------------------------

    def policy(self) -> PolicyView:
        return PolicyView(self._version, self.rules, self.scheduled)

    def apply(self, policy: ClusterPolicy, former: int) -> int:
        if former != self._version:
            raise PolicyChanged(f"version {self._version} is applied, not {former}")
        self._version += 1
        self.rules = policy
        for site in self.sites_.all():
            site.follow(policy, self.clock())
        self._follow(policy.schedules)
        return self._version

    # -- handlers -----------------------------------------------------------------------------

    def state_load(self, key: str) -> bytes | None:
        value, until_ns = self.board.state.get(key, (None, 0))
        return None if until_ns and until_ns <= self.clock() else value

    def state_save(self, key: str, value: bytes | None, *, ttl_ns: int = 0) -> None:
        if value is None:
            self.board.state.pop(key, None)
        else:
            self.board.state[key] = (value, self.clock() + ttl_ns if ttl_ns else 0)

    def states(self, tenure: int, asks: Sequence[StateAsk]) -> list[StateView]:
        self._node(tenure)
        views = []
        for ask in asks:
            if not ask.saves:
                views.append(StateView(value=self.state_load(ask.key)))
            elif self._held(tenure, [Held(ask.id, ask.claim)]):
                self.state_save(ask.key, ask.value, ttl_ns=ask.ttl_ns)
                views.append(StateView())
            else:
                views.append(StateView(held=False))
        return views

    def locks(self, tenure: int, asks: Sequence[LockAsk]) -> list[LockView]:
        self._node(tenure)
        return [self._lock(tenure, ask) for ask in asks]

    def _lock(self, tenure: int, ask: LockAsk) -> LockView:
        line = self.board.locks.setdefault(ask.name, [])
        mine = next((each for each in line if each.token == ask.token), None)
        passes = ask.kind == "pass" and len(line) > 1 and line[0] is mine
        if mine is not None and (ask.kind == "leave" or passes):
            line.remove(mine)
            mine = None
        if mine is None and ask.kind != "leave":
            line.append(Lock(ask.token, tenure, ask.holder))
        if not line:
            del self.board.locks[ask.name]
            return LockView(False)
        return LockView(line[0].token == ask.token, line[0].holder)

    def progress(self, tenure: int, marks: Sequence[ProgressMark]) -> list[str]:
        now_ns, early = self.clock(), []
        for mark in marks:
            task = self.board.live.get(mark.id)
            if task is None or task.tenure != tenure:
                continue
            if now_ns - self._progress_ns.get(mark.id, -PROGRESS_GAP_NS) >= PROGRESS_GAP_NS:
                self._progress_ns[mark.id] = now_ns
                for each in [task, *self.followers(task)]:
                    each.fraction, each.text, each.said = mark.fraction, mark.text, True
            else:
                early.append(mark.id)
        return early

    def marks(self, waiter: int, age_ns: int) -> list[ProgressMark]:
        since_ns = self.clock() - age_ns
        marks = []
        for id_, at_ns in self._progress_ns.items():
            task = self.board.live.get(id_)
            if task is None or at_ns <= since_ns or not waiter:
                continue
            for each in [task, *self.followers(task)]:
                if each.waiter == waiter:
                    marks.append(ProgressMark(each.spec.id, task.fraction, task.text))
        return marks[:MARKS_MAX]
