"""The engine on PostgreSQL. Every decision is made by a function of the schema (schema/0001).

Each method calls one function, in one transaction. What others have to know of it comes after the
commit, in a transaction that waits for no disk (`_wake`): lanes come back into the ring, nodes and
those who wait are notified. If that is lost, the next tick does it.

One connection, used by one thread. It is opened again by the next call after it was lost.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import msgspec
import psycopg
from psycopg import sql

from musterd.ipc.wire.messages import (
    INVALID_TASK,
    Outcome,
    Rejection,
    TaskSpec,
    TaskView,
)
from musterd.supervisor.cluster import checks
from musterd.supervisor.cluster.columns import (
    END_COLUMNS,
    SIGNATURES,
    SPEC_COLUMNS,
    columns,
    declared,
    possible,
    unsendable,
)
from musterd.supervisor.cluster.engine import (
    BATCH_MAX,
    ENDED_MAX,
    Cards,
    ClusterPolicy,
    Count,
    End,
    Ended,
    EngineAway,
    EngineError,
    EngineUnreached,
    Fenced,
    Fetched,
    Grant,
    Held,
    Joined,
    NameTaken,
    NodeCard,
    NodeView,
    Orders,
    PolicyChanged,
    PolicyView,
    Reaped,
    Recent,
    SiteView,
    Statistics,
    TaskFilter,
    Ticked,
    Told,
    Verdict,
    Want,
)
from musterd.supervisor.cluster.handling import (
    LockAsk,
    LockView,
    ProgressMark,
    StateAsk,
    StateView,
)
from musterd.supervisor.cluster.logging_in import LoginView
from musterd.supervisor.cluster.migrate import SCHEMA, VERSION
from musterd.supervisor.cluster.postgres_logins import LoginCalls
from musterd.supervisor.cluster.postgres_schedules import ScheduleCalls
from musterd.supervisor.cluster.rows import (
    STATES,
    Row,
    Wakes,
    conditions,
    grant,
    note_lanes,
    outcome,
    tell,
    view,
)

RETRY_MAX = 100  # tasks of one call, each with arguments of up to 4 MiB
ASKED = -1  # a claimed task that was cancelled: its node ends it
LOST = -1  # a claim that is not the node's any more
LOCK_KINDS = {"want": 0, "pass": 1, "leave": 2}
PARTS = ("expire", "pay", "ready", "repair", "shut", "tidy")  # of a tick, each its own transaction
NAME_TAKEN = "MU002"
REFUSALS = {"MU001": Fenced, "MU003": PolicyChanged}
# The transaction was undone, and may be tried again: deadlock, serialization, a lock not had, a
# partition made at this moment (add_partitions), a server that is read-only for now.
AGAIN = ("40P01", "40001", "55P03", "23514", "25006")

_unpack_card = msgspec.msgpack.Decoder(NodeCard).decode
_decode_statistics = msgspec.json.Decoder(Statistics).decode
_pack = msgspec.msgpack.Encoder().encode


class PostgresEngine(LoginCalls, ScheduleCalls):
    def __init__(
        self, url: str, schema: str = SCHEMA, *, alone: int = 0, patience_seconds: float = 0
    ) -> None:
        """`alone` is the number of the session: former ones of its node are ended (checks.py).

        With `patience_seconds` a call that takes longer is ended by the server.
        """
        self._url = url
        self._alone = alone
        self._patience_ms = round(patience_seconds * 1000)
        self._schema = schema
        self._connection: psycopg.Connection[Row] | None = None
        self._queries: dict[str, sql.Composed] = {}

    def check(self, function: str = "claim_1", role: str = "node") -> list[str]:
        """Refuse a database that cannot be used, or a user without `role` that may not call the
        function; return warnings about the others."""
        self.close()
        connection = self._connection = checks.connect(self._url)
        try:
            checks.pooler(connection, self._url)  # first: what is set would be others' settings
            checks.server(connection)
            checks.usable(connection, self._schema, VERSION, role)
            checks.may(connection, self._schema, function, role)
            warnings = checks.warnings(connection)
            self._make_ready(connection)
        except psycopg.Error as error:
            refusal = self._refusal(error)
            self.close()
            raise refusal from error
        except EngineError:
            self.close()
            raise
        return warnings

    def cluster(self) -> str:
        """Return which cluster this is: a random name that it keeps."""
        query = sql.SQL("SELECT cluster::text FROM {}()").format(
            sql.Identifier(self._schema, "version_1")
        )
        row = self._connected().execute(query).fetchone()
        assert row is not None
        return str(row[0])

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # -- calls --------------------------------------------------------------------------------

    def _connected(self) -> psycopg.Connection[Row]:
        if self._connection is not None and checks.is_stale(self._connection):
            self.close()
        if self._connection is None or self._connection.closed:
            connection = self._connection = checks.connect(self._url)
            try:
                checks.server(connection)  # it may be another one, or be set up otherwise by now
                self._make_ready(connection)
            except BaseException:
                self.close()
                raise
        return self._connection

    def _make_ready(self, connection: psycopg.Connection[Row]) -> None:
        """Make this engine's session of a connection."""
        if self._alone:
            checks.be_alone(connection, self._alone)
        if self._patience_ms:
            limit = "SELECT set_config('statement_timeout', %s, false)"
            connection.execute(limit, (str(self._patience_ms),))
        connection.prepare_threshold = 0

    def _call(self, function: str, *parameters: object) -> list[Row]:
        """Call a function of the schema; return its rows."""
        query = self._queries.get(function)
        if query is None:
            types = SIGNATURES[function].split()
            marks = sql.SQL(", ").join(sql.SQL(f"%b::{each}") for each in types)
            name = sql.Identifier(self._schema, function)
            query = self._queries[function] = sql.SQL("SELECT * FROM {}({})").format(name, marks)
        try:
            return self._connected().execute(query, parameters, binary=True).fetchall()
        except psycopg.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: psycopg.Error) -> EngineError:
        why = error.diag.message_primary or ""
        if error.sqlstate == NAME_TAKEN:
            return NameTaken(why, int(error.diag.message_detail or 0))
        refusal = REFUSALS.get(error.sqlstate or "")
        if refusal is not None:
            return refusal(why)
        said = f"PostgreSQL at {checks.place(self._url)}: {error}"
        if self._connection is None or self._connection.closed or self._connection.broken:
            self.close()
            return EngineAway(said)
        if error.sqlstate in AGAIN or isinstance(error, psycopg.OperationalError):
            return EngineUnreached(said)  # it was undone: its disk is full, for one
        return EngineError(str(error))

    def _wake(self, wakes: Wakes) -> None:
        """Wake what a commit has made ready; a wake that is lost is made up for by a tick.

        Notifications need no pause that gathers them: a node has one call of a kind under way, and
        what comes meanwhile is the next one's (docs/cluster.md has figures).
        """
        while wakes != Wakes(waiter=wakes.waiter):
            told, wakes.told = list(wakes.told), {}
            try:
                rows = self._call(
                    "wake_1",
                    wakes.lanes or None,
                    wakes.low,
                    wakes.targets or None,
                    wakes.classes or None,
                    wakes.ready or None,
                    wakes.hasten or None,
                    wakes.known or None,
                    wakes.waiter,
                    told or None,
                )
            except EngineAway:
                return
            wakes = Wakes()
            tell(rows, wakes)  # tasks that did not wait for a shut site have ended

    # -- nodes --------------------------------------------------------------------------------

    def give_back(self, identity: str) -> None:
        wakes = Wakes()
        tell(self._call("give_back_1", identity), wakes)
        self._wake(wakes)

    def join(self, card: NodeCard) -> Joined:
        rows = self._call("join_1", card.identity, *declared(card))
        wakes = Wakes()
        tell([row[3:] for row in rows], wakes)
        self._wake(wakes)
        return Joined(*rows[0][:3])

    def redeclare(self, tenure: int, card: NodeCard) -> None:
        self._call("redeclare_1", tenure, *declared(card))

    def rejoin(self, tenure: int, running: Sequence[Held]) -> list[str]:
        ids, claims = [each.id for each in running], [each.claim for each in running]
        rows = self._call("rejoin_1", tenure, ids, claims)
        wakes = Wakes()
        tell([row for row in rows if row[2] != LOST], wakes)
        self._wake(wakes)
        return [row[0] for row in rows if row[2] == LOST]

    def release(self, tenure: int, known: Sequence[Held]) -> int:
        ids, claims = [each.id for each in known], [each.claim for each in known]
        wakes = Wakes()
        told = tell(self._call("release_1", tenure, ids, claims), wakes)
        self._wake(wakes)
        return len(told)

    def beat(self, tenure: int) -> Orders:
        [(epoch, policy, draining, cancel, scheduled, *failed)] = self._call("beat_1", tenure)
        rows = zip(*[column or () for column in failed], strict=True)
        logins = tuple([LoginView(*row) for row in rows])
        return Orders(epoch, policy, draining, tuple(cancel or ()), scheduled, logins)

    def leave(self, tenure: int) -> None:
        wakes = Wakes()
        tell(self._call("leave_1", tenure), wakes)
        self._wake(wakes)

    def reap(self) -> list[Reaped]:
        reaped = []
        while rows := self._call("reap_1"):
            wakes = Wakes()
            told = tell([row[2:] for row in rows], wakes)
            self._wake(wakes)
            reaped.append(Reaped(rows[0][0], rows[0][1], len(told)))
        return reaped

    def nodes(self) -> list[NodeView]:
        views = []
        for row in self._call("nodes_1"):
            identity, name, tenure, alive, draining, claims, age_ns, software, card, lost = row
            known = (identity, name, tenure, alive, draining, claims, age_ns, software)
            views.append(NodeView(*known, _unpack_card(card).pools, lost))
        return views

    def cards(self, seen: str = "") -> Cards | None:
        rows = self._call("cards_1", seen)
        if not rows:
            return None
        return Cards(rows[0][0], tuple(_unpack_card(card) for _, card in rows if card is not None))

    def drain(self, name: str, *, draining: bool) -> bool:
        return bool(self._call("drain_1", name, draining)[0][0])

    def forget(self, name: str, *, force: bool = True) -> bool:
        rows = self._call("forget_1", name, force)
        wakes = Wakes()
        tell([row[1:] for row in rows], wakes)
        self._wake(wakes)
        return bool(rows)

    # -- tasks --------------------------------------------------------------------------------

    def submit(
        self, tasks: Sequence[TaskSpec], *, waiter: int = 0, resend: bool = False
    ) -> list[Verdict]:
        wakes = Wakes(waiter=waiter)
        verdicts = self._submit(tasks, waiter, resend, wakes)
        self._wake(wakes)
        return verdicts

    def _submit(
        self, tasks: Sequence[TaskSpec], waiter: int, resend: bool, wakes: Wakes
    ) -> list[Verdict]:
        assert len(tasks) <= BATCH_MAX, len(tasks)
        verdicts = [Verdict(spec.id, "accepted") for spec in tasks]
        sent: list[int] = []
        for place, spec in enumerate(tasks):
            why = unsendable(spec)
            if why:
                rejection = Rejection(spec.id, INVALID_TASK, why)
                verdicts[place] = Verdict(spec.id, "rejected", rejection=rejection)
            else:
                sent.append(place)
        if not sent:
            return verdicts
        lists = columns(SPEC_COLUMNS, [tasks[place] for place in sent])
        for row in self._call("submit_1", *lists, waiter, resend):
            if row[0]:
                place = sent[row[0] - 1]
                verdicts[place] = self._verdict(tasks[place].id, row, wakes)
            else:
                note_lanes(row[11:], wakes)
        return verdicts

    def _verdict(self, id_: str, row: Row, wakes: Wakes) -> Verdict:
        _, state, code, why, retry_ns, *ending = row[:11]
        if state == "rejected":
            why = f"'{id_}' was not accepted: {why}"
            return Verdict(id_, state, rejection=Rejection(id_, code, why, retry_ns))
        answer = outcome(id_, *ending) if ending[0] is not None else None
        if state == "answered" and answer is not None:
            answer = msgspec.structs.replace(answer, cached=True)
            wakes.told[wakes.waiter] = None
        if state == "known" and answer is None and wakes.waiter:
            wakes.known.append(id_)
        return Verdict(id_, state, answer)

    def claim(self, tenure: int, wants: Sequence[Want]) -> list[Grant]:
        rows = self._call(
            "claim_1",
            tenure,
            [each.pool for each in wants],
            [each.count for each in wants],
            [name for each in wants for name in each.names],
        )
        return self._with_logins([grant(row) for row in rows])

    def begun(self, tenure: int, claims: Sequence[Held]) -> None:
        ids, numbers = [each.id for each in claims], [each.claim for each in claims]
        self._call("begun_1", tenure, ids, numbers)

    def finish(self, tenure: int, ends: Sequence[End]) -> list[Told]:
        assert len(ends) <= BATCH_MAX, len(ends)
        verdicts = {each.id: each.login for each in ends if each.login is not None}
        rows = self._finish(tenure, columns(END_COLUMNS, ends), verdicts)
        wakes = Wakes()
        told = tell(rows, wakes)
        self._wake(wakes)
        if any(each.said == "wanted" for each in verdicts.values()):
            with suppress(EngineAway):  # the next tick does it
                self._begin_logins()
        return told

    def ended(self, waiter: int, after: str = "", limit: int = ENDED_MAX) -> Ended:
        [(now, ids, more)] = self._call("ended_1", waiter, after, limit)
        return Ended(tuple(ids or ()), now, more)

    def look_up(self, ids: Sequence[str]) -> list[Outcome]:
        return [outcome(*row) for row in self._call("look_up_1", possible(ids))]

    def fetch(self, ids: Sequence[str], bytes_max: int) -> Fetched:
        outcomes, alive, unread, marks, next_bytes = [], [], [], [], 0
        for row in self._call("fetch_1", possible(ids), bytes_max):
            id_, is_alive, size, read, *ending, fraction, text = row
            if is_alive:
                alive.append(id_)
                if fraction is not None:
                    marks.append(ProgressMark(id_, fraction, text))
            elif read:
                outcomes.append(outcome(id_, *ending))
            else:
                unread.append(id_)
                next_bytes = next_bytes or size
        known = {*alive, *unread, *(each.id for each in outcomes)}
        absent = tuple([id_ for id_ in ids if id_ not in known])
        return Fetched(
            tuple(outcomes), tuple(alive), absent, tuple(unread), next_bytes, tuple(marks)
        )

    def cancel(self, ids: Sequence[str]) -> list[str]:
        rows, wakes = self._call("cancel_1", possible(ids)), Wakes()
        tell(rows, wakes)
        self._wake(wakes)
        return [row[0] for row in rows if row[2] in (ASKED, 6)]

    def retry(self, ids: Sequence[str]) -> list[Rejection]:
        chosen, rejected = list(dict.fromkeys(ids)), []
        for first in range(0, len(chosen), RETRY_MAX):
            part, wakes = chosen[first : first + RETRY_MAX], Wakes()
            for place, code, why, retry_ns, *lanes in self._call("retry_1", part):
                if place:
                    rejected.append(Rejection(part[place - 1], code, why, retry_ns))
                else:
                    note_lanes(lanes, wakes)
            self._wake(wakes)
        return rejected

    def purge(self, which: TaskFilter) -> int:
        ids = list(which.ids) if which.ids is not None else None
        total = 0
        while number := int(self._call("purge_1", *conditions(which), ids, which.older_ns)[0][0]):
            total += number
        return total

    def view(self, id_: str) -> TaskView | None:
        rows = [row for each in possible([id_]) for row in self._call("view_1", each)]
        return view(rows[0]) if rows else None

    def find(self, which: TaskFilter) -> list[TaskView]:
        return [view(row) for row in self._call("find_1", *conditions(which), which.limit)]

    def recent(self, span_ns: int) -> list[Recent]:
        return [Recent(*row) for row in self._call("recent_1", span_ns)]

    def counts(self) -> list[Count]:
        rows = self._call("counts_1")
        counts = [Count(pool, level, STATES[state], tasks) for pool, level, state, tasks in rows]
        return sorted(counts, key=lambda each: (each.pool, each.level, each.state))

    def invalidate(self, key: str, *, prefix: bool = False) -> None:
        for each in possible([key]):
            self._call("invalidate_1", each, prefix)

    def tick(self) -> Ticked:
        ticked = dict.fromkeys(PARTS, 0)
        for part in PARTS:
            rows = self._call("tick_1", part)
            if part == "ready":
                ticked[part] = sum(row[3] for row in rows)
                continue
            wakes = Wakes()
            ticked[part] = sum(each.state != "" for each in tell(rows, wakes))
            self._wake(wakes)
        self._begin_logins()
        return Ticked(ticked["ready"], ticked["expire"], ticked["pay"])

    def retain(self, keep_ns: int) -> int:
        """Make partitions for ended tasks ahead, and drop those that are older; return how many.

        Lanes that are not used any more go, too.
        """
        self._call("tick_1", "lanes")
        return int(self._call("retain_1", keep_ns)[0][0])

    # -- sites and policy ---------------------------------------------------------------------

    def policy(self) -> PolicyView:
        [(version, doc, scheduled)] = self._call("policy_1")
        try:
            return PolicyView(version, msgspec.json.decode(doc, type=ClusterPolicy), scheduled)
        except msgspec.DecodeError as error:
            why = f"policy {version} of the cluster cannot be read by this version ({error})"
            raise EngineError(f"{why}: upgrade musterd here") from None

    def apply(self, policy: ClusterPolicy, former: int) -> int:
        return int(self._call("apply_1", msgspec.json.encode(policy), former)[0][0])

    def sites(self) -> list[SiteView]:
        return [SiteView(*row) for row in self._call("sites_1")]

    def breaker(self, target: str, command: Literal["open", "close", "disable", "reset"]) -> None:
        self._call("breaker_1", target, command)
        self._wake(Wakes(targets=[target]))

    # -- handlers -----------------------------------------------------------------------------

    def state_load(self, key: str) -> bytes | None:
        value: bytes | None = self._call("state_load_1", key)[0][0]
        return value

    def state_save(self, key: str, value: bytes | None, *, ttl_ns: int = 0) -> None:
        self._call("state_save_1", key, value, ttl_ns)

    def states(self, tenure: int, asks: Sequence[StateAsk]) -> list[StateView]:
        assert len(asks) <= BATCH_MAX, len(asks)
        rows = self._call(
            "states_1",
            tenure,
            [each.id for each in asks],
            [each.claim for each in asks],
            [each.key for each in asks],
            [each.saves for each in asks],
            [each.value for each in asks],
            [each.ttl_ns for each in asks],
        )
        views = {place: StateView(held, value) for place, held, value in rows}
        return [views[place] for place in range(1, len(asks) + 1)]

    def locks(self, tenure: int, asks: Sequence[LockAsk]) -> list[LockView]:
        assert len(asks) <= BATCH_MAX, len(asks)
        rows = self._call(
            "locks_1",
            tenure,
            [each.name for each in asks],
            [each.token for each in asks],
            [LOCK_KINDS[each.kind] for each in asks],
            [each.holder.replace("\0", "") for each in asks],
        )
        free = sorted({tenure for _, _, tenure in rows if tenure is not None})
        if free:
            with suppress(EngineAway):  # they look again by themselves
                self._call("lock_wake_1", free)
        return [LockView(taken, holder) for taken, holder, _ in rows]

    def progress(self, tenure: int, marks: Sequence[ProgressMark]) -> list[str]:
        ids, fractions = [each.id for each in marks], [each.fraction for each in marks]
        texts = [each.text.replace("\0", "") for each in marks]
        return [row[0] for row in self._call("progress_1", tenure, ids, fractions, texts)]

    def marks(self, waiter: int, age_ns: int) -> list[ProgressMark]:
        return [ProgressMark(*row) for row in self._call("marks_1", waiter, age_ns)]

    def statistics(self, age_ns: int = 0) -> Statistics | None:
        for found_ns, doc in self._call("statistics_1", age_ns):
            return msgspec.structs.replace(_decode_statistics(doc), age_ns=found_ns)
        return None
