"""What PostgreSQL itself records of a chaos run, and what must hold of that record.

The audit is put into the database beside the product's functions. It stands in the transactions of
the claims and ends that it records: whatever a crash of the server undoes, it undoes of both.

- `audit.granted`: each attempt that was granted, with an instant before its claim and one after.
- `audit.held`: each place of a site or class that a claim took (+1) or gave back (-1), in an order
  in which a place that was free for a claim was given back before.
- `audit.passed`: each lane with a task that a claim passed by while it granted a lower level of the
  same pool, though that task was committed, in the ring and not expired before the claim began.
- `audit.ended`: each final state.

How a claim is watched: whoever calls claim_1 calls a function that takes the locks of the claim
(tenure, pools, and the rows of sites and classes that nobody has locked), looks, calls the real one
and looks again. Claims of a pool come one after the other under these locks, so nobody else can
have taken what was there before. What was committed before is what the first look could see: the
transaction that wrote a row is compared with the snapshot of that look. A gate is shut if it was
shut before the claim, or if what the claim itself granted has shut it. A site that somebody else
had locked has its turn next time (`busy`); a lane that nobody has brought back into the ring yet is
woken after the commit (`asleep`). Neither can be claimed; both are counted, and shown.
"""

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct
from postgres import Cluster

from musterd.supervisor.cluster.migrate import locks

SUCCEEDED, FAILED, CANCELLED, EXPIRED = 4, 5, 6, 7  # in `done`
STATES = {SUCCEEDED: "succeeded", FAILED: "failed", CANCELLED: "cancelled", EXPIRED: "expired"}
ROUNDING = 0.01  # tasks: PostgreSQL's clock counts microseconds

AUDIT = """
CREATE SCHEMA audit;
CREATE SEQUENCE audit.number;
CREATE TABLE audit.granted (
  number bigint NOT NULL DEFAULT nextval('audit.number'), began timestamptz NOT NULL,
  ended timestamptz NOT NULL, tenure int NOT NULL, id text NOT NULL, claim bigint NOT NULL,
  pool int NOT NULL, level int NOT NULL, target text NOT NULL);
CREATE TABLE audit.held (
  number bigint NOT NULL DEFAULT nextval('audit.number'), change int NOT NULL, id text NOT NULL,
  claim bigint NOT NULL, site text, class text);
CREATE TABLE audit.passed (
  number bigint NOT NULL DEFAULT nextval('audit.number'), at timestamptz NOT NULL,
  why text NOT NULL, id text NOT NULL, lane int NOT NULL, level int NOT NULL,
  granted int NOT NULL, detail text);
CREATE TABLE audit.ended (
  number bigint NOT NULL DEFAULT nextval('audit.number'), id text NOT NULL, state int NOT NULL);

CREATE FUNCTION audit.moved() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  IF OLD.state = 1 AND num_nonnulls(OLD.held, OLD.held_class) > 0
    AND (TG_OP = 'DELETE' OR NEW.state <> 1 OR NEW.claim <> OLD.claim)
  THEN
    INSERT INTO audit.held (change, id, claim, site, class)
    VALUES (-1, OLD.id, OLD.claim, OLD.held, OLD.held_class);
  END IF;
  IF TG_OP = 'UPDATE' AND NEW.state = 1 AND num_nonnulls(NEW.held, NEW.held_class) > 0
    AND (OLD.state <> 1 OR NEW.claim <> OLD.claim)
  THEN
    INSERT INTO audit.held (change, id, claim, site, class)
    VALUES (1, NEW.id, NEW.claim, NEW.held, NEW.held_class);
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER audit_moved AFTER UPDATE OF state, claim ON {schema}.live FOR EACH ROW
  WHEN (OLD.state = 1 OR NEW.state = 1) EXECUTE FUNCTION audit.moved();
CREATE TRIGGER audit_gone AFTER DELETE ON {schema}.live FOR EACH ROW
  WHEN (OLD.state = 1) EXECUTE FUNCTION audit.moved();

CREATE FUNCTION audit.ended() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  INSERT INTO audit.ended (id, state) VALUES (NEW.id, NEW.state);
  RETURN NULL;
END $$;
CREATE TRIGGER audit_ended AFTER INSERT ON {schema}.done FOR EACH ROW
  EXECUTE FUNCTION audit.ended();

ALTER FUNCTION {schema}.claim_1(int, text[], int[], text[]) RENAME TO claim_unseen;
CREATE FUNCTION {schema}.claim_1(p_tenure int, p_pools text[], p_counts int[], p_names text[])
RETURNS SETOF {schema}.granted LANGUAGE plpgsql SECURITY DEFINER
SET search_path = {schema}, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
  began timestamptz; before pg_snapshot; stood lane[]; inside jsonb; inside_class jsonb;
  free text[]; free_class text[]; g granted; ids text[];
BEGIN
  PERFORM pg_advisory_xact_lock_shared({tenures}, p_tenure);
  PERFORM pg_advisory_xact_lock({pools}, x.pool) FROM (
    SELECT p.pool FROM pool p WHERE p.name = ANY (p_pools) ORDER BY p.pool) x;
  SELECT array_agg(x.target) INTO free FROM (
    SELECT s.target FROM site s ORDER BY s.target FOR UPDATE SKIP LOCKED) x;
  SELECT array_agg(x.name) INTO free_class FROM (
    SELECT c.name FROM class c WHERE c.max_concurrent > 0 ORDER BY c.name
    FOR UPDATE SKIP LOCKED) x;
  began := clock_timestamp();
  SELECT pg_current_snapshot(),
    (SELECT array_agg(l) FROM pool p JOIN lane l ON l.pool = p.pool
      WHERE p.name = ANY (p_pools) AND l.level < 3),
    (SELECT jsonb_object_agg(x.held, x.n) FROM (
      SELECT v.held, count(*) AS n FROM live v WHERE v.held IS NOT NULL AND v.state + 0 = 1
      GROUP BY 1) x),
    (SELECT jsonb_object_agg(x.held_class, x.n) FROM (
      SELECT v.held_class, count(*) AS n FROM live v
      WHERE v.held_class IS NOT NULL AND v.state + 0 = 1 GROUP BY 1) x)
  INTO before, stood, inside, inside_class;
  FOR g IN SELECT * FROM claim_unseen(p_tenure, p_pools, p_counts, p_names) LOOP
    ids := ids || g.id;
    RETURN NEXT g;
  END LOOP;
  IF ids IS NULL THEN RETURN; END IF;
  INSERT INTO audit.granted (began, ended, tenure, id, claim, pool, level, target)
  SELECT began, clock_timestamp(), p_tenure, v.id, v.claim, l.pool, l.level, l.target
  FROM live v JOIN lane l ON l.lane = v.lane WHERE v.id = ANY (ids);
  INSERT INTO audit.passed (at, why, id, lane, level, granted, detail)
  SELECT began, y.why, y.id, y.lane, y.level, y.granted, y.detail FROM (
    SELECT w.id, b.lane, b.level, t.level AS granted, CASE
      WHEN b.state = 'e' OR b.head >= w.seq THEN 'asleep'
      WHEN b.state = 'p' AND (b.wake_at IS NULL OR b.wake_at > began)
        THEN CASE WHEN gate.shut THEN 'shut' ELSE 'asleep' END
      WHEN s.target <> ALL (coalesce(free, '{{}}')) OR c.name <> ALL (coalesce(free_class, '{{}}'))
        THEN 'busy'
      WHEN gate.shut THEN 'shut' ELSE 'inversion' END AS why,
      format('%s before %s', to_jsonb(b), before) AS detail
    FROM (
      SELECT l.pool, max(l.level) AS level FROM live v JOIN lane l ON l.lane = v.lane
      WHERE v.id = ANY (ids) GROUP BY 1) t
    JOIN unnest(stood) b ON b.pool = t.pool AND b.level < t.level
    CROSS JOIN LATERAL (
      SELECT v.id, v.seq FROM live v
      WHERE v.lane = b.lane AND v.state = 0 AND v.name = ANY (p_names)
        AND pg_visible_in_snapshot(v.xmin::text::xid8, before)
        AND (v.expires_at IS NULL OR v.expires_at > clock_timestamp())
      ORDER BY v.seq <= b.head, v.seq LIMIT 1) w
    LEFT JOIN site s ON s.target = b.target AND b.target <> ''
    LEFT JOIN class c ON c.name = b.class AND c.max_concurrent > 0
    CROSS JOIN LATERAL (SELECT
      coalesce(s.max_concurrent > 0 AND s.max_concurrent <= coalesce((inside ->> s.target)::int, 0)
        + (SELECT count(*) FROM live v WHERE v.id = ANY (ids) AND v.held = s.target), false)
      OR coalesce(c.max_concurrent <= coalesce((inside_class ->> c.name)::int, 0)
        + (SELECT count(*) FROM live v WHERE v.id = ANY (ids) AND v.held_class = c.name), false)
      OR coalesce(extract(epoch FROM began + s.burst * s.cost - greatest(s.tat, began))
        / extract(epoch FROM s.cost) + 1e-9 < 1, false) AS shut) gate) y
  WHERE y.why <> 'shut';
END $$;
REVOKE ALL ON FUNCTION {schema}.claim_1(int, text[], int[], text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION {schema}.claim_1(int, text[], int[], text[]) TO {schema}_node;
"""


class Limit(Struct, frozen=True):
    """What the policy allows a site."""

    places: int = 0  # 0: no limit
    rate: float = 0.0  # 0: no limit
    burst: int = 1


class Record(Struct, frozen=True):
    """What the audit found, beside what must not be."""

    grants: int
    busy: int  # claims passed a lane whose site somebody else had locked
    asleep: int  # claims passed a lane that was not woken yet
    most: dict[str, int]  # claims at once, by site
    most_in_class: dict[str, int]
    fastest: dict[str, float]  # the worst share of what a rate allows, by site
    final: dict[str, int]  # final states


class Audit:
    """The record of one database."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        first = locks(cluster.schema)
        cluster.sql(AUDIT.format(schema=cluster.schema, tenures=first + 3, pools=first + 1))

    def check(
        self,
        expected: Mapping[str, frozenset[str]],
        limits: Mapping[str, Limit],
        classes: Mapping[str, int],
    ) -> Record:
        """Check everything that must hold. `expected`: by which states each task may end."""
        sql = self._cluster.sql
        left = sql(f"SELECT id, state FROM {self._cluster.schema}.live LIMIT 10")
        assert not left, f"they have not ended: {left}"
        final = self._check_ends(expected)
        inversions = sql("SELECT * FROM audit.passed WHERE why = 'inversion' LIMIT 10")
        assert not inversions, inversions
        passed = Counter({str(why): int(str(n)) for why, n in sql(_PASSED)})
        most = self._check_places("site", {name: each.places for name, each in limits.items()})
        most_in_class = self._check_places("class", classes)
        rated = {name: each for name, each in limits.items() if each.rate}
        fastest = {name: self._check_rate(name, each) for name, each in rated.items()}
        grants = int(str(sql("SELECT count(*) FROM audit.granted")[0][0]))
        return Record(grants, passed["busy"], passed["asleep"], most, most_in_class, fastest, final)

    def _check_ends(self, expected: Mapping[str, frozenset[str]]) -> dict[str, int]:
        """Check that each task ended once, as it may, and that nothing else did."""
        ends = Counter[str]()
        final = Counter[str]()
        for id_, state in self._cluster.sql("SELECT id, state FROM audit.ended"):
            ends[str(id_)] += 1
            name = STATES[int(str(state))]
            final[name] += 1
            assert name in expected.get(str(id_), ()), f"{id_} has ended as {name}"
        lost = [id_ for id_ in expected if id_ not in ends]
        assert not lost, f"{len(lost)} were acknowledged and are lost: {lost[:10]}"
        twice = [id_ for id_, number in ends.items() if number > 1]
        assert not twice, f"{len(twice)} have two final states: {twice[:10]}"
        table = self._cluster.sql(
            f"SELECT count(*), count(DISTINCT id) FROM {self._cluster.schema}.done"
        )
        assert table == [(len(ends), len(ends))], table
        return dict(final)

    def _check_places(self, column: str, places: Mapping[str, int]) -> dict[str, int]:
        """Check that no site or class ever had more claims than places; return the most."""
        now: Counter[str] = Counter()
        most: dict[str, int] = {}
        holds = f"FROM audit.held WHERE {column} IS NOT NULL ORDER BY number"
        for found, change in self._cluster.sql(f"SELECT {column}, change {holds}"):
            name = str(found)
            now[name] += int(str(change))
            most[name] = max(most.get(name, 0), now[name])
        over = {name: n for name, n in most.items() if places.get(name) and n > places[name]}
        assert not over, f"more claims at once than places: {over}"
        assert not any(now.values()), f"places are left behind: {now}"
        return {name: n for name, n in most.items() if places.get(name)}

    def _check_rate(self, site: str, limit: Limit) -> float:
        """Check that no stretch of time has more than rate x time + burst; return the worst share.

        A stretch goes from before the first of its claims to after the last.
        """
        rows = self._cluster.sql(
            "SELECT extract(epoch FROM began)::float8, extract(epoch FROM ended)::float8 "
            "FROM audit.granted WHERE target = %s ORDER BY number",
            site,
        )
        worst, least = 0.0, float("inf")
        for number, (began, ended) in enumerate(rows):
            least = min(least, number - limit.rate * float(str(began)))
            surplus = number + 1 - limit.rate * float(str(ended)) - least
            worst = max(worst, surplus / limit.burst)
            assert surplus <= limit.burst + ROUNDING, f"{site}: {surplus} more than the rate allows"
        return worst


_PASSED = "SELECT why, count(*) FROM audit.passed GROUP BY 1"
