"""Clients: they submit, repeat, watch and cancel, and resubmit what a dead supervisor forgot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from musterd.ipc.wire.messages import (
    INVALID_TASK,
    LOW,
    QUEUE_FULL,
    SHUTTING_DOWN,
    UNKNOWN_TASK,
    Outcome,
    Rejection,
    TaskSpec,
)
from musterd.supervisor.core.model.events import (
    CancelRequested,
    InvalidateRequested,
    PeerLost,
    TasksSubmitted,
    TasksWatched,
)
from simulation.profile import METHODS, MS, SEC, SESSIONS, US

NOBODY = "a task that was never submitted"

if TYPE_CHECKING:
    from simulation.world import World

CALLER = b"control:"  # prefix of the name of a person who uses musterctl
FALLBACK_ON = ("", "failure", "", "open")  # in turn, so that older seeds keep their meaning
WIRE_NS = (30 * US, 2 * MS)
SECRETS = 5  # in each fifth submit the shell has refused a task already
REFUSALS_MAX = 60  # after that many QueueFull a client gives a task up


class Client:
    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.number = number
        self._connection = 0
        self._arrival_ns = 0
        self._made = 0
        self.unacknowledged: dict[int, list[TaskSpec]] = {}
        self.refused: dict[str, TaskSpec] = {}  # to be submitted again in the next life
        self.retrying = 0  # refused by a full queue, about to be submitted again
        self._refusals: dict[str, int] = {}
        self.waits_for: dict[str, None] = {}  # acknowledged, outcome not heard yet
        self.told: dict[str, Outcome] = {}

    @property
    def peer(self) -> bytes:
        return b"%d/%d" % (self.number, self._connection)

    @property
    def content(self) -> bool:
        return not (self.unacknowledged or self.refused or self.retrying or self.waits_for)

    # -- requests -----------------------------------------------------------------------------

    def plan(self, tasks: int) -> None:
        world = self._world
        rng = world.rng
        burst_ns = world.profile.faults_ns if rng.random() < 0.7 else 20 * MS
        while tasks > 0:
            count = min(tasks, rng.randint(1, world.profile.batch))
            tasks -= count
            world.after(world.delay(0, burst_ns), self._submit_new, count)

    def _submit_new(self, count: int) -> None:
        profile, rng = self._world.profile, self._world.rng
        specs: list[TaskSpec] = []
        like: TaskSpec | None = None  # the model for all of them
        if profile.alike and rng.random() < profile.alike:
            like = msgspec.structs.replace(self.make_task(), target="", delay_ns=0, expires_ns=0)
        for _ in range(count):
            spec = self.make_task()
            if like is not None:
                spec = msgspec.structs.replace(like, id=spec.id)
            specs.append(spec)
            if rng.random() < profile.repeat:
                self._repeat(specs, spec)
            if rng.random() < profile.cancel:
                self._world.after(self._world.delay(0, 2 * SEC), self._cancel, [spec.id])
        self._submit(specs, resend=False)

    def _repeat(self, specs: list[TaskSpec], spec: TaskSpec) -> None:
        rng = self._world.rng
        kind = rng.randrange(3)
        if kind == 0:
            specs.append(spec)
        elif kind == 1:
            specs.append(msgspec.structs.replace(spec, args=b"another body"))
        else:
            self._world.after(self._world.delay(MS, 3 * SEC), self._submit, [spec], True)

    def make_task(self) -> TaskSpec:
        world = self._world
        profile, rng = world.profile, world.rng
        self._made += 1
        pool = f"pool{rng.randrange(profile.pools)}"
        method = rng.choices(METHODS, profile.weights)[0]
        if rng.random() < profile.unknown:
            pool, method = rng.choice(((pool, "absent"), ("nowhere", method)))
        id_ = f"{self.number}-{self._made}"
        if rng.random() < profile.poison:
            world.poison[id_] = None
        chance = rng.random
        return TaskSpec(
            id_,
            f"{pool}.{method}",
            b"",
            priority=rng.randint(0, LOW),
            target=f"site{rng.randrange(profile.targets)}" if profile.targets > 1 else "",
            timeout_ns=rng.choice((30 * MS, 500 * MS, 3 * SEC))
            if chance() < profile.own_timeout
            else 0,
            max_retries=rng.randint(0, 3) if chance() < 0.3 else -1,
            delay_ns=world.delay(1, 3 * SEC) if chance() < profile.delay else 0,
            expires_ns=world.delay(5 * MS, 4 * SEC) if chance() < profile.expiry else 0,
            **(self._gate_options() if profile.gates else {}),
            **(self._key_options(f"{pool}.{method}") if profile.keys else {}),
            session=self._session() if profile.sessions else "",
        )

    def _gate_options(self) -> dict[str, Any]:
        rng = self._world.rng
        return {
            "policy": rng.choice(("", "", "few", "hasty", "unheard-of")),
            "on_open": rng.choice(("", "", "wait", "fail", "fallback")),
            "fallback": b"\x01" if rng.random() < 0.3 else None,
            "fallback_on": FALLBACK_ON[self._made % len(FALLBACK_ON)],
        }

    def _session(self) -> str:
        return self._world.rng.choice(("", *SESSIONS, *SESSIONS, "unheard-of"))

    def _key_options(self, name: str) -> dict[str, Any]:
        world, rng = self._world, self._world.rng
        kind = rng.choices((name, "shared", ""), (16, 1, 3))[0]
        if kind == "shared" and world.profile.reloads:
            kind = name  # a pool that comes back may find its keys used by another
        key = f"{kind}#{rng.randrange(world.profile.keys)}" if kind else ""
        if rng.random() < 0.06:
            event = InvalidateRequested(*rng.choice(((key, False), (kind, True), ("", True))))
            world.after(world.delay(0, 2 * SEC), self._send, lambda: event)
        options: dict[str, Any] = {"key": key}
        if key and rng.random() < 0.3:
            options["cache_ns"] = world.delay(1 * MS, 3 * SEC)
        if key and rng.random() < 0.3:
            options["debounce_ns"] = world.delay(1 * MS, 2 * SEC)
        if not world.profile.gates and rng.random() < 0.2:
            options["fallback"] = b"\x01"
            options["fallback_on"] = FALLBACK_ON[self._made % len(FALLBACK_ON)]
        return options

    def _cancel(self, ids: list[str]) -> None:
        for id_ in ids:
            self._world.cancelled[id_] = None
        request = self._world.new_request()
        if request % 2:
            self._send(lambda: CancelRequested(ids, self.peer, request))
        else:  # a person cancels
            peer = self._world.new_caller()
            self._send(lambda: CancelRequested(ids, peer))

    # -- its connection -----------------------------------------------------------------------

    def _send(self, make_event: object) -> None:
        """Send in order. When the supervisor dies, messages are lost or kept for the next one."""
        world = self._world
        self._arrival_ns = max(self._arrival_ns, world.now_ns + world.delay(*WIRE_NS))
        world.after(self._arrival_ns - world.now_ns, self._arrive, world.life, make_event)

    def _arrive(self, life: int, make_event: object) -> None:
        world = self._world
        if not world.up or (life != world.life and world.rng.random() < 0.5):
            return
        world.tell(make_event())  # type: ignore[operator]

    def _submit(self, specs: list[TaskSpec], resend: bool) -> None:
        request = self._world.new_request()
        self.unacknowledged[request] = specs
        world = self._world

        def make() -> TasksSubmitted:
            wall_ns = world.now_ns + world.wall_offset_ns
            secret = [] if request % SECRETS else [_gives_away(f"{self.number}-secret-{request}")]
            return TasksSubmitted(self.peer, request, specs, wall_ns, resend, secret)

        self._send(make)

    def welcome(self) -> None:
        """Repeat what a new supervisor or connection may not know."""
        self._connection += 1
        unacknowledged, self.unacknowledged = self.unacknowledged, {}
        for specs in unacknowledged.values():
            self._submit(specs, resend=True)
        refused, self.refused = self.refused, {}
        if refused:
            self._submit(list(refused.values()), resend=False)
        ids = list(self.waits_for)
        if self._world.profile.unreadable:
            ids.append(NOBODY)
        if ids:
            self._send(lambda: TasksWatched(self.peer, ids))

    def lose_connection(self) -> None:
        peer = self.peer
        self._world.tell(PeerLost(peer))
        fleet = self._world.fleet
        for task in fleet.tasks.values():
            assert peer not in (task.peer, *(task.watchers or ())), task.spec.id
        assert all(place.peer != peer for place in fleet.on_disk.values()), peer
        assert all(peer not in waiting for waiting in fleet._disk_queue.watchers.values()), peer
        assert all(peer not in waiting for waiting in fleet._state.stranded.values()), peer
        self.welcome()

    # -- answers ------------------------------------------------------------------------------

    def accepted(self, request: int, rejected: list[Rejection]) -> None:
        specs = self.unacknowledged.pop(request, None)
        if specs is None:
            return
        by_id = {rejection.id: rejection for rejection in rejected}
        for spec in specs:
            rejection = by_id.get(spec.id)
            if rejection is None:
                assert spec.policy in ("", *self._world.policy.classes), spec.policy
                assert spec.session in ("", *SESSIONS), spec.session
                if spec.id not in self.told:
                    self.waits_for[spec.id] = None
            else:
                self._refused(spec, rejection)

    def _refused(self, spec: TaskSpec, rejection: Rejection) -> None:
        world = self._world
        pool, _, method = spec.name.partition(".")
        known = method in METHODS and pool in world.pool_names
        if rejection.code == QUEUE_FULL:
            refusals = self._refusals[spec.id] = self._refusals.get(spec.id, 0) + 1
            if refusals <= REFUSALS_MAX:
                assert rejection.retry_after_ns > 0, rejection
                self.retrying += 1
                world.after(rejection.retry_after_ns * refusals, self._try_again, spec)
        elif rejection.code == SHUTTING_DOWN:
            assert not world.sockets_survive, (
                f"{spec.id} is refused although the next one will take it"
            )
            self.refused[spec.id] = spec
        elif rejection.code == UNKNOWN_TASK and known and world.profile.reloads:
            self.retrying += 1  # its pool may come back
            world.after(world.delay(200 * MS, 1 * SEC), self._try_again, spec)
        elif rejection.code == UNKNOWN_TASK:
            assert not known, f"{spec.name} is known, yet: {rejection.message}"
        else:
            assert rejection.code == INVALID_TASK, rejection

    def _try_again(self, spec: TaskSpec) -> None:
        self.retrying -= 1
        # Another body with the same id may have arrived meanwhile, so this is a repetition.
        self._submit([spec], resend=True)

    def outcomes(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.id in self._world.watch.reopened:
                self.told[outcome.id] = outcome
            before = self.told.setdefault(outcome.id, outcome)
            assert before == outcome, f"{outcome.id} was told as {before} and as {outcome}"
            self.waits_for.pop(outcome.id, None)

    def missing(self, ids: list[str]) -> None:
        for id_ in ids:
            assert id_ not in self.waits_for, f"acknowledged task {id_} is missing"


def _gives_away(id_: str) -> Rejection:
    """Refuse a task of the submit, as the shell does (config/redact.py): the core never sees it."""
    return Rejection(id_, INVALID_TASK, "its arguments give a secret away")
