"""Answer what clients ask about schedules, their results and the tasks of a function, here and in
the cluster.

A supervisor beside is asked first, over the client's own connection to local.sock: a schedule that
it has is meant. All others are the cluster's. A schedule that is put goes to where the pool of its
task is.

Answers of the engine come later. What a client was not answered when PostgreSQL went away is
answered with why: to put, delete or pause again does no harm, and a run has an id.
"""

from collections.abc import Callable
from random import Random

import msgspec
from msgspec import structs

from musterd.ipc.wire.history import Entries
from musterd.ipc.wire.messages import Rejection
from musterd.ipc.wire.resolving import NAMES_SHOWN_MAX, Resolve, Resolved
from musterd.ipc.wire.schedule_messages import (
    SCHEDULES_SHOWN_MAX,
    STORE_FAILS,
    UNKNOWN_SCHEDULE,
    DeleteSchedules,
    PauseSchedule,
    PutSchedules,
    RunSchedule,
    ScheduleAnswer,
    SchedulePut,
    Schedules,
    ShowSchedules,
)
from musterd.supervisor.cluster.added import added
from musterd.supervisor.cluster.adding import refusal
from musterd.supervisor.cluster.engine import Cards, ScheduleView, Settled
from musterd.supervisor.cluster.schedule_views import due_run, shown
from musterd.supervisor.cluster.sidecar_events import (
    AboutSchedules,
    EngineAnswered,
    EngineFailed,
    SchedulesAnswer,
    SchedulesAsked,
)
from musterd.supervisor.config.timezones import time_zone
from musterd.supervisor.core.model.schedule_events import (
    ScheduleDeleteRequested,
    SchedulePauseRequested,
    ScheduleRunRequested,
)
from musterd.supervisor.node.engines import Engines, Job
from musterd.supervisor.settings.added_schedules import read_shared
from musterd.supervisor.sockets.clients import ClientPort
from musterd.supervisor.sockets.peers import HistoryWanted, ResolutionWanted, SchedulesWanted
from musterd.supervisor.sockets.schedule_requests import PutWanted

RUN_TRIES_MAX = 10  # to run one by hand, while nodes decide about it

Wanted = (
    HistoryWanted
    | ResolutionWanted
    | SchedulesWanted
    | PutWanted
    | ScheduleDeleteRequested
    | ScheduleRunRequested
    | SchedulePauseRequested
)
AskLocal = Callable[[SchedulesAsked], None]


class ScheduleDesk:
    def __init__(
        self, engines: Engines, clients: ClientPort, rng: Random, ask_local: AskLocal | None = None
    ) -> None:
        """`ask_local` asks the supervisor beside, which answers to `told`; None: there is none."""
        self._engines = engines
        self._clients = clients
        self._rng = rng
        self._ask_local = ask_local
        self._waiting: dict[int, Callable[[SchedulesAnswer], None]] = {}  # for the supervisor
        self.local_pools: frozenset[str] = frozenset()

    def take(self, event: object) -> bool:
        """Answer what a client asks about schedules, now or later; False: it asks other things."""
        match event:
            case HistoryWanted():
                self._recall(event)
            case ResolutionWanted():
                self._resolve(event)
            case SchedulesWanted(peer, message):
                token = self._clients.hold(peer, message.request)
                self._show(peer.name, token, message)
            case PutWanted(peer, token, schedules):
                self._put(peer, token, schedules)
            case ScheduleDeleteRequested(names, peer, token):
                self._delete(peer, token, names)
            case ScheduleRunRequested(name, peer, token):
                self._run(peer, token, event)
            case SchedulePauseRequested(name, paused, peer, token):
                wish = PauseSchedule(token, name, paused)
                self._change(peer, token, wish, lambda: self._pause(token, name, paused))
            case _:
                return False
        return True

    def told(self, token: int, answer: SchedulesAnswer) -> None:
        """Hear the supervisor."""
        waiting = self._waiting.pop(token, None)
        if waiting is not None:
            waiting(answer)

    def forget_lost(self) -> None:
        """Forget the questions of clients that are gone."""
        for token in [token for token in self._waiting if not self._clients.holds(token)]:
            del self._waiting[token]

    # -- the two sides ------------------------------------------------------------------------

    def _first_here(
        self,
        peer: bytes,
        token: int,
        message: AboutSchedules,
        heard: Callable[[SchedulesAnswer], None],
    ) -> bool:
        """Ask the supervisor; False if there is none."""
        if self._ask_local is None:
            return False
        self._waiting[token] = heard
        self._ask_local(SchedulesAsked(peer, token, message))
        return True

    def _call(
        self,
        token: int,
        method: str,
        arguments: tuple[object, ...],
        answered: Callable[[object], None],
        failed: Callable[[str], None] | None = None,
        **options: object,
    ) -> None:
        def heard(event: EngineAnswered | EngineFailed) -> None:
            if isinstance(event, EngineAnswered):
                answered(event.result)
                return
            why = _why(event)
            if failed is not None:
                failed(why)
            else:
                self._clients.acknowledge(token, [Rejection("", STORE_FAILS, why)])

        self._engines.call(Job(0, method, arguments, options, heard))

    # -- results ------------------------------------------------------------------------------

    def _recall(self, wanted: HistoryWanted) -> None:
        question = wanted.question

        def shared() -> None:
            numbers = tuple(question.numbers) or None
            options = {} if numbers else {"limit": question.limit}

            def found(result: object) -> None:
                if isinstance(result, list):
                    self._clients.recall(wanted, result)
                else:
                    why = f"there is no schedule '{question.schedule}'"
                    self._clients.recall(wanted, [], why, unknown=True)

            def failed(why: str) -> None:
                self._clients.recall(wanted, [], why)

            arguments = (question.schedule, numbers)
            self._call(wanted.token, "history", arguments, found, failed, **options)

        def heard(answer: SchedulesAnswer) -> None:
            assert isinstance(answer, Entries), answer
            if answer.unknown:
                shared()
            else:
                self._clients.recall(wanted, answer.entries, answer.error)

        message = structs.replace(question, request=wanted.token)
        peer = self._clients.holder(wanted.token)
        if not self._first_here(peer, wanted.token, message, heard):
            shared()

    # -- tasks of a function ------------------------------------------------------------------

    def _resolve(self, wanted: ResolutionWanted) -> None:
        """Answer with the tasks of this machine and of all nodes."""

        def shared(here: Resolved) -> None:
            def found(result: object) -> None:
                assert isinstance(result, Cards)
                cards = [pool for card in result.cards for pool in card.pools]
                there = [
                    f"{pool.name}.{task.method}"
                    for pool in cards
                    for task in pool.tasks
                    if task.place == wanted.place
                ]
                tasks = sorted({*here.tasks, *there})[:NAMES_SHOWN_MAX]
                pools = sorted({*here.pools, *(pool.name for pool in cards)})[:NAMES_SHOWN_MAX]
                self._clients.resolve(wanted, structs.replace(here, tasks=tasks, pools=pools))

            def failed(why: str) -> None:
                self._clients.resolve(wanted, structs.replace(here, error=why))

            self._call(wanted.token, "cards", ("",), found, failed)

        def heard(answer: SchedulesAnswer) -> None:
            assert isinstance(answer, Resolved), answer
            shared(answer)

        message = Resolve(wanted.token, wanted.place)
        peer = self._clients.holder(wanted.token)
        if not self._first_here(peer, wanted.token, message, heard):
            shared(Resolved(0))

    # -- lists --------------------------------------------------------------------------------

    def _show(self, peer: bytes, token: int, asked: ShowSchedules) -> None:
        def shared(here: Schedules) -> None:
            def found(result: object) -> None:
                assert isinstance(result, list)
                names = {each.name for each in here.schedules}
                views = [shown(each, time_zone) for each in result[:SCHEDULES_SHOWN_MAX]]
                both = [*here.schedules, *(each for each in views if each.name not in names)]
                both.sort(key=lambda each: each.name)
                # What lies behind the end of a list that goes on may come after others of it.
                ends = [here.schedules[-1].name] if here.more and here.schedules else []
                if len(result) > SCHEDULES_SHOWN_MAX:
                    ends.append(views[-1].name)
                part = [each for each in both if not ends or each.name <= min(ends)]
                more = bool(ends) or len(part) > SCHEDULES_SHOWN_MAX
                self._clients.show_later(token, part[:SCHEDULES_SHOWN_MAX], more)

            limit = SCHEDULES_SHOWN_MAX + 1
            options = {"after": asked.after, "limit": limit}
            failed = lambda why: self._clients.drop(token, why)  # noqa: E731 - it asks again
            self._call(token, "schedules", (asked.name,), found, failed, **options)

        def heard(answer: SchedulesAnswer) -> None:
            assert isinstance(answer, Schedules), answer
            if asked.name and answer.schedules:
                self._clients.show_later(token, answer.schedules, False)
            else:
                shared(answer)

        if not self._first_here(peer, token, structs.replace(asked, request=token), heard):
            shared(Schedules(token, []))

    # -- changes of schedules -----------------------------------------------------------------

    def _put(self, peer: bytes, token: int, puts: list[SchedulePut]) -> None:
        here = [each for each in puts if _pool_of(each.section) in self.local_pools]
        there = [(each.name, each.section) for each in puts if each not in here]

        def shared(rejected: list[Rejection]) -> None:
            if not there:
                self._clients.acknowledge(token, rejected)
                return

            def known(result: object) -> None:
                assert isinstance(result, Cards)
                pools = {pool.name for card in result.cards for pool in card.pools}
                redact = tuple(sorted({word for card in result.cards for word in card.redact}))
                usable, wrong = read_shared(pools, redact, there)
                policies = [(each.policy, each.section) for each in usable if each.policy]

                def done(refused: object) -> None:
                    assert isinstance(refused, list)
                    self._clients.acknowledge(token, [*rejected, *wrong, *refused])

                self._call(token, "put", (added(policies, self._rng),), done)

            self._call(token, "cards", ("",), known)

        def heard(answer: SchedulesAnswer) -> None:
            assert isinstance(answer, ScheduleAnswer), answer
            shared(answer.rejected)

        if not here or not self._first_here(peer, token, PutSchedules(token, here), heard):
            shared([])

    def _delete(self, peer: bytes, token: int, names: list[str]) -> None:
        def shared(names: list[str], rejected: list[Rejection]) -> None:
            def done(refused: object) -> None:
                assert isinstance(refused, list)
                self._clients.acknowledge(token, [*rejected, *refused])

            if names:
                self._call(token, "delete", (tuple(names),), done)
            else:
                self._clients.acknowledge(token, rejected)

        def heard(answer: SchedulesAnswer) -> None:
            assert isinstance(answer, ScheduleAnswer), answer
            unknown = [each.id for each in answer.rejected if each.code == UNKNOWN_SCHEDULE]
            others = [each for each in answer.rejected if each.code != UNKNOWN_SCHEDULE]
            shared(unknown, others)

        if not self._first_here(peer, token, DeleteSchedules(token, names), heard):
            shared(names, [])

    def _change(
        self, peer: bytes, token: int, message: AboutSchedules, shared: Callable[[], None]
    ) -> None:
        """Do something to one schedule: here, or in the cluster if it is not here."""

        def heard(answer: SchedulesAnswer) -> None:
            assert isinstance(answer, ScheduleAnswer), answer
            if any(each.code == UNKNOWN_SCHEDULE for each in answer.rejected):
                shared()
            else:
                self._clients.acknowledge(token, answer.rejected)

        if not self._first_here(peer, token, message, heard):
            shared()

    def _pause(self, token: int, name: str, paused: bool) -> None:
        def done(known: object) -> None:
            refused = [] if known else [refusal(name, UNKNOWN_SCHEDULE)]
            self._clients.acknowledge(token, refused)

        self._call(token, "pause", (name,), done, paused=paused)

    def _run(self, peer: bytes, token: int, asked: ScheduleRunRequested) -> None:
        message = RunSchedule(token, asked.name, asked.id, asked.again)
        self._change(peer, token, message, lambda: self._look_and_run(token, asked, 1))

    def _look_and_run(self, token: int, asked: ScheduleRunRequested, tries: int) -> None:
        def known(result: object) -> None:
            assert isinstance(result, Cards)
            self._call(token, "schedules", (asked.name,), lambda views: found(result, views))

        def found(cards: Cards, result: object) -> None:
            assert isinstance(result, list)
            if not result:
                self._clients.acknowledge(token, [refusal(asked.name, UNKNOWN_SCHEDULE)])
                return
            view: ScheduleView = result[0]
            run = due_run(view, asked.id, cards.cards, time_zone)
            if run is None:  # it is alive: an answer was lost
                self._clients.acknowledge(token, [])
            elif isinstance(run, Rejection):
                self._clients.acknowledge(token, [run])
            else:
                due = view.due
                self._call(
                    token,
                    "settle",
                    (due, (run,)),
                    settled,
                    last_ns=due.last_ns,
                    next_ns=view.next_ns,
                    memory=due.memory,
                    resend=True,
                )

        def settled(result: object) -> None:
            if isinstance(result, Settled):
                refused = [each.rejection for each in result.verdicts if each.rejection is not None]
                self._clients.acknowledge(token, refused)
            elif tries < RUN_TRIES_MAX:  # a node has just decided about it
                self._look_and_run(token, asked, tries + 1)
            else:
                why = f"schedule '{asked.name}' changes all the time: try again"
                self._clients.acknowledge(token, [Rejection(asked.name, STORE_FAILS, why)])

        self._call(token, "cards", ("",), known)


def _pool_of(section: bytes) -> str:
    """Return the pool of a schedule's task; "" where it cannot be read."""
    try:
        keys = msgspec.msgpack.decode(section)
        return str(keys["task"]).partition(".")[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return ""
    except (TypeError, KeyError):  # no table, or no task
        return ""


def _why(event: EngineFailed) -> str:
    reason = " ".join(event.reason.split())
    if "permission denied" in reason:
        return (
            "the user of the URL may not do this with schedules, or read their results: that takes "
            f"the role musterd_admin, or a node's socket ({reason})"
        )
    return f"the cluster's database does not answer, so nothing is certain: {reason}; try again"
