"""No statement reads more of `live` than it needs, whatever PostgreSQL knows about the table.

Plans are made once in a session, with the statistics of that moment. When the table is empty or all
of it is queued, every index looks as good as any other; when it is full of claimed and dead rows, a
wrong one makes each call a hundred times slower. So each plan is looked at, for an empty table and
for a full one.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
from postgres import Cluster, Server
from rig import UNWELL, Rig, end

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.node_messages import LoginVerdict
from musterd.supervisor.cluster.engine import (
    ClusterPolicy,
    EndKind,
    Held,
    Run,
    ScheduleCard,
)
from musterd.supervisor.cluster.handling import (
    ProgressMark,
    StateAsk,
)
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy
from musterd.supervisor.core.model.runs import Way

QUEUED = 5_000
LANES = 50
SETTINGS = {
    "session_preload_libraries": "auto_explain",
    "auto_explain.log_min_duration": "0",
    "auto_explain.log_nested_statements": "on",
    "auto_explain.log_format": "json",
}
SCANS = ("Seq Scan", "Index Scan", "Index Only Scan", "Bitmap Heap Scan")
PLAN = re.compile(r"plan:\n((?:\t.*\n)+)")
# All that an index without conditions has is wanted: what waits for a site's budget.
WHOLE = {"live_unpaid"}
# Conditions that an index answers: none of them is left to a look at each row.
NARROW = re.compile(r"\(\(?(id|held|held_class|lane|expires_at|ready_at)(\)::text)? (=|<=) ")
KINDS = ("succeeded", "failed", "untouched", "interrupted", "crashed", "succeeded")
POLICY = ClusterPolicy(
    targets={"limited": TargetPolicy(max_concurrent=2, rate=100, burst=50, policy="few")},
    classes={"few": GatePolicy(max_concurrent=3)},
    schedules=(ScheduleCard("kites"),),
)


@pytest.fixture(scope="module")
def explained(server: Server) -> Cluster:
    """A cluster whose plans are all logged."""
    cluster = Cluster(server, "plans")
    for name, value in SETTINGS.items():
        server.execute(f"ALTER DATABASE plans SET {name} = '{value}'")
    return cluster


@pytest.mark.parametrize("full", [False, True], ids=["empty", "full"])
def test_tasks_are_found_by_an_index_that_narrows(explained: Cluster, full: bool) -> None:
    explained.reset()
    rig = explained.rig()
    rig.apply(POLICY)
    if full:
        _fill(explained, rig)
    before = len(explained.server.log)
    _do_everything(explained.rig())  # in a new session, without any plan
    explained.close()
    scans = list(_scans(explained.server.log[before:]))
    assert {scan["Index Name"] for scan in scans if "Index Name" in scan} >= {
        *("live_pkey", "live_queued", "live_waiting", "live_expiring", "live_held", "live_claimed")
    }
    wrong = {_described(scan) for scan in scans if not _narrows(scan)}
    assert not wrong, "see the head of 10_tables.sql:\n" + "\n".join(sorted(wrong))


def _narrows(scan: dict[str, Any]) -> bool:
    index = scan.get("Index Name", "")
    if index in WHOLE:
        return True
    return "Index Cond" in scan and (
        index == "live_pkey" or not NARROW.search(scan.get("Filter", ""))
    )


def _described(scan: dict[str, Any]) -> str:
    keys = ("Node Type", "Index Name", "Index Cond", "Filter")
    how = ", ".join(f"{key} {scan[key]}" for key in keys if key in scan)
    return f"{how}: {' '.join(scan['query'].split())[:200]}"


def _scans(log: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of all plans in the log that read rows of `live` where they are."""
    for found in PLAN.finditer(log):
        told = json.loads(found[1])
        nodes = [told["Plan"]]
        while nodes:
            node = nodes.pop()
            nodes += node.get("Plans", [])
            if node.get("Relation Name") == "live" and node["Node Type"] in SCANS:
                yield {**node, "query": told["Query Text"]}


def _fill(cluster: Cluster, rig: Rig) -> None:
    """Queue many tasks of many lanes, and let PostgreSQL know."""
    rig.join("z")
    rig.submit(*[rig.task(id=f"s{number}", target=f"site{number}") for number in range(LANES)])
    cluster.sql(
        f"INSERT INTO {cluster.schema}.live (id, seq, lane, state, submitted_at, queued_at, owner, "
        "name, priority, args) SELECT 'g' || g, nextval('musterd.seq'), "
        f"l.lanes[1 + g %% {LANES}], 0, now(), now(), 10, 'p.extract', 2, '' "
        f"FROM generate_series(1, {QUEUED}) g, "
        f"(SELECT array_agg(lane) AS lanes FROM {cluster.schema}.lane) l WHERE %s",
        True,
    )
    cluster.sql("ANALYZE")


def _do_everything(rig: Rig) -> None:
    engine = rig.engine
    a = rig.join("a")
    plain, limited = rig.tasks(12), rig.tasks(12, target="limited")
    rig.submit(*plain, waiter=7)
    rig.submit(*limited, waiter=7)
    rig.submit(*rig.tasks(3, key="k"), waiter=7)
    rig.submit(*rig.tasks(3, delay_ns=SECOND_NS, expires_ns=2 * SECOND_NS), waiter=7)
    engine.submit(plain[:2], waiter=7, resend=True)
    rig.pass_time(1.5)
    engine.tick()
    rig.pass_time(1.5)
    engine.tick()
    grants = rig.claim(a, 40)
    held = [Held(grant.id, grant.claim) for grant in grants]
    engine.begun(a, held)
    engine.progress(a, [ProgressMark(grants[0].id, 0.5, "half")])
    saved = [StateAsk(each.id, each.claim, "key", saves=True, value=b"1") for each in held[:3]]
    engine.states(a, saved)
    rig.finish(a, *grants[:3])
    for place, grant in enumerate(grants[3:]):
        kind = cast("EndKind", KINDS[place % len(KINDS)])
        how = {"failure": UNWELL, "retry_ns": 1} if kind == "failed" else {}
        engine.finish(a, [end(grant, kind, **how)])
    _run_schedules(rig, a)
    _log_in(rig, a)
    engine.cancel([grants[0].id, grants[-1].id])
    more = [Held(grant.id, grant.claim) for grant in rig.claim(a, 40)]
    engine.rejoin(a, more)
    engine.release(a, more[1:])
    engine.beat(a)
    engine.tick()
    engine.reap()
    engine.nodes()
    engine.sites()
    engine.fetch([each.id for each in held], 1000)
    engine.look_up([each.id for each in held])
    engine.view(held[0].id)
    engine.leave(a)


def _run_schedules(rig: Rig, tenure: int) -> None:
    """Run a schedule whose runs wait for a retry: one ends for the next one, one is hastened."""
    ways: tuple[tuple[str, Way], ...] = (("1", "begins"), ("2m", "replaces"), ("", "hastens"))
    for mark, way in ways:
        [due] = rig.engine.due()
        runs = (
            [Run(due.now_ns, rig.task(id=f"@kites.{mark}", key="kite", priority=0))] if mark else []
        )
        moved = {"last_ns": due.now_ns, "next_ns": due.now_ns, "memory": b""}
        assert rig.engine.settle(due, runs, way=way, **moved) is not None  # type: ignore[arg-type]
        rig.engine.schedules()
        grants = [each for each in rig.claim(tenure, 40) if each.id.startswith("@kites")]
        assert grants
        rig.finish(tenure, *grants, kind="failed", retry_ns=60 * SECOND_NS)


def _log_in(rig: Rig, tenure: int) -> None:
    """Have a login task run for a task of a session."""
    rig.submit(*rig.tasks(2, session="acme", priority=0))
    for kind, said in (("untouched", "wanted"), ("succeeded", "worked"), ("failed", "failed")):
        rig.engine.tick()
        (grant,) = [each for each in rig.claim(tenure, 40) if each.spec.session]
        verdict = LoginVerdict("acme", cast("Any", said), 2, 1, 10, "", "p.fetch")
        rig.finish(tenure, grant, kind=kind, login=verdict)
    rig.engine.sessions()
    rig.engine.logins()
