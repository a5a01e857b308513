"""The audit of chaos runs says what is wrong, and nothing where all is well."""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
from chaos_audit import Audit, Limit, Record
from postgres import Cluster, Server
from rig import Rig

from musterd.ipc.wire.messages import TaskSpec
from musterd.supervisor.cluster.engine import ClusterPolicy
from musterd.supervisor.core.model.policy import GatePolicy, TargetPolicy

LIMITS = {"s": Limit(places=2), "r": Limit(rate=0.5, burst=3)}
POLICY = ClusterPolicy(
    targets={
        "s": TargetPolicy(max_concurrent=2),
        "r": TargetPolicy(rate=0.5, burst=3),
        "g": TargetPolicy(policy="gold"),
    },
    classes={"gold": GatePolicy("gold", max_concurrent=2)},
)
MAY = frozenset(("succeeded",))
_numbers = count(1)

Break = Callable[[Cluster], object]


class Case:
    """A database with the audit; `run` submits tasks, has them claimed and ended, and checks."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rig: Rig = cluster.rig()
        self._audit = Audit(cluster)
        self._rig.apply(POLICY)
        self._tenure = self._rig.join()

    def run(self, *specs: TaskSpec, wrong: Break = lambda _: None) -> Record:
        rig = self._rig
        ids = rig.submit(*specs)
        wrong(self._cluster)
        while self._cluster.sql("SELECT FROM musterd.live WHERE state = 0"):
            grants = rig.claim(self._tenure, 20)
            assert grants
            rig.finish(self._tenure, *grants)
        return self._audit.check(dict.fromkeys(ids, MAY), LIMITS, {"gold": 2})

    def mixed(self) -> list[TaskSpec]:
        targets = ("", "s", "g", "other")
        return [
            self._rig.task(priority=n % 4, target=targets[n // 4 % len(targets)]) for n in range(48)
        ]

    def tasks(self, number: int, target: str) -> list[TaskSpec]:
        return self._rig.tasks(number, target=target)


@pytest.fixture
def case(server: Server) -> Iterator[Case]:
    cluster = Cluster(server, f"audit{next(_numbers)}")
    yield Case(cluster)
    cluster.close()


def test_claims_as_they_are_pass(case: Case) -> None:
    record = case.run(*case.mixed(), *case.tasks(3, "r"))
    assert record.grants == 51
    assert (record.most, record.most_in_class) == ({"s": 2}, {"gold": 2})
    assert record.fastest["r"] > 0.9
    assert record.final == {"succeeded": 51}


def last_level_first(cluster: Cluster) -> None:
    arguments = "int, bigint, int, int, int, text[], timestamptz"
    cluster.sql(f"ALTER FUNCTION musterd.take({arguments}) RENAME TO take_rightly")
    cluster.sql(
        f"CREATE FUNCTION musterd.take({arguments}) RETURNS SETOF musterd.granted LANGUAGE sql "
        f"AS 'SELECT * FROM musterd.take_rightly($1, $2, $3, 3 - $4, $5, $6, $7)'"
    )


def end_twice(cluster: Cluster) -> None:
    cluster.sql(
        "CREATE FUNCTION audit.again() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF pg_trigger_depth() = 1 THEN NEW.finished_at := NEW.finished_at + interval '1s'; "
        "INSERT INTO musterd.done VALUES (NEW.*); END IF; RETURN NULL; END $$; "
        "CREATE TRIGGER again AFTER INSERT ON musterd.done FOR EACH ROW "
        "EXECUTE FUNCTION audit.again()"
    )


WRONG: dict[str, tuple[str, Break]] = {
    "a lower level first": ("inversion", last_level_first),
    "a place too many": (
        "more claims at once",
        lambda each: each.sql("UPDATE musterd.site SET max_concurrent = 3 WHERE target = 's'"),
    ),
    "a place of a class too many": (
        "more claims at once",
        lambda each: each.sql("UPDATE musterd.class SET max_concurrent = 3"),
    ),
    "too fast": (
        "more than the rate",
        lambda each: each.sql("UPDATE musterd.site SET burst = 9 WHERE target = 'r'"),
    ),
    "two ends": ("two final states", end_twice),
    "lost": (
        "are lost",
        lambda each: each.sql(
            "DELETE FROM musterd.live WHERE id = (SELECT min(id) FROM musterd.live)"
        ),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_seen(case: Case, what: str) -> None:
    said, wrong = WRONG[what]
    number = 5 if what == "too fast" else 3
    with pytest.raises(AssertionError, match=said):
        case.run(*case.mixed(), *case.tasks(number, "r"), wrong=wrong)
