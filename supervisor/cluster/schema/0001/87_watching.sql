-- Results of schedules: ended runs that wait to be judged, what is known of a schedule's results,
-- its history, and changes. A node judges (supervisor/cluster/judging.py); nothing here reads records
-- or entries.

-- What is known of the results of a schedule. A table of its own: who settles a schedule holds its row
-- while it submits.
CREATE TABLE watched (
  schedule text COLLATE "C" PRIMARY KEY,
  turn bigint NOT NULL,                 -- fences: it is another one after each judgement
  record bytea NOT NULL);
-- Ended runs of schedules with `notify` that nobody has judged, in the transaction of the end.
CREATE TABLE ended_run (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, schedule text COLLATE "C" NOT NULL,
  kind smallint NOT NULL,               -- 0 a good result, 1 a failure, 2 the schedule begins anew
  task text COLLATE "C" NOT NULL, at timestamptz NOT NULL, digest text NOT NULL,
  value bytea,                          -- NULL: longer than history keeps
  view bytea, watch bytea, error text);
CREATE INDEX ended_run_schedule ON ended_run (schedule, number);
CREATE TABLE history (
  schedule text COLLATE "C", number bigint, changed_ns bigint NOT NULL,  -- 0: it was no change
  before bigint NOT NULL, entry bytea NOT NULL, PRIMARY KEY (schedule, number));
CREATE INDEX history_changed ON history (changed_ns) WHERE changed_ns > 0;
-- What is told of results, on all nodes: changes, and schedules that are stale or have recovered.
CREATE TABLE change (
  number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event text NOT NULL,
  schedule text COLLATE "C" NOT NULL, task text NOT NULL, digest text NOT NULL,
  entry bigint NOT NULL, before bigint NOT NULL, at timestamptz NOT NULL, at_ns bigint NOT NULL,
  reason text NOT NULL, count bigint NOT NULL, pool text NOT NULL,
  announced bigint, taken timestamptz,  -- who alerts people of it, and since when
  again bool NOT NULL DEFAULT false,    -- another one had taken it before
  told bool NOT NULL DEFAULT false,     -- ... and has done so
  xact xid8 NOT NULL DEFAULT pg_current_xact_id());
CREATE INDEX change_xact ON change (xact);
CREATE INDEX change_at ON change (at);
CREATE INDEX change_newest ON change (schedule, number);
CREATE INDEX change_untold ON change (schedule, number) WHERE NOT told;

-- Note how a run has ended, if its schedule wants to know.
CREATE FUNCTION note_run(p_id text, p_opts opts, e ending, p_error text) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE name_ text := schedule_of(p_id); good bool := e.state = 4 AND e.source IN ('-', 'c');
BEGIN
  IF NOT EXISTS (SELECT FROM schedule s WHERE s.name = name_ AND s.notify)
    OR NOT (e.state IN (4, 5) OR e.attempts > 0) THEN RETURN; END IF;
  INSERT INTO ended_run (schedule, kind, task, at, digest, value, watch, error)
  VALUES (name_, CASE WHEN good THEN 0 ELSE 1 END, p_id, clock(),
    CASE WHEN good THEN encode(sha256(e.value), 'hex') ELSE '' END,
    CASE WHEN good AND octet_length(e.value) <= 262144 THEN e.value END, (p_opts).watch,
    coalesce(e.error, p_error));
END $$;

-- Note what the worker saw of the result of a run that has just ended.
CREATE FUNCTION note_view(p_id text, p_view bytea) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE ended_run s SET view = p_view
  WHERE s.schedule = schedule_of(p_id) AND s.task = p_id AND s.kind = 0 AND s.view IS NULL;
END $$;

-- Forget the results of schedules that are gone, or whose changes nobody wants to know.
CREATE FUNCTION forget_results() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM forget_results_of(ARRAY(
    SELECT w.schedule FROM (SELECT x.schedule FROM watched x UNION SELECT y.schedule FROM ended_run y) w
    WHERE NOT EXISTS (SELECT FROM schedule s WHERE s.name = w.schedule AND s.notify)));
END $$;

CREATE FUNCTION forget_results_of(p_names text[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM watched w WHERE w.schedule = ANY (p_names) ORDER BY w.schedule FOR UPDATE;
  DELETE FROM watched w WHERE w.schedule = ANY (p_names);
  DELETE FROM history h WHERE h.schedule = ANY (p_names);
  DELETE FROM ended_run n WHERE n.schedule = ANY (p_names);
END $$;

-- What no node can judge does not pile up: 1,000 of each schedule stay.
CREATE FUNCTION tidy_seen() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  DELETE FROM ended_run n WHERE NOT EXISTS (SELECT FROM schedule s WHERE s.name = n.schedule);
  DELETE FROM ended_run n WHERE n.number IN (
    SELECT x.number FROM (SELECT y.number,
      row_number() OVER (PARTITION BY y.schedule ORDER BY y.number DESC) AS place FROM ended_run y) x
    WHERE x.place > 1000);
END $$;

-- Ended runs that wait to be judged, at most 200 or 4 MiB, but for schedules that the caller cannot
-- judge; each schedule with what is known of it.
CREATE FUNCTION watched_1(p_skip text[]) RETURNS TABLE (name text, plan bytea, turn bigint,
  record bytea, untold bigint[], numbers bigint[], kinds smallint[], tasks text[], ats bigint[],
  digests text[], vals bytea[], views bytea[], watches bytea[], errors text[])
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  WITH chosen AS (
    SELECT x.* FROM (
      SELECT n.*, sum(coalesce(octet_length(n.value), 0) + coalesce(octet_length(n.view), 0))
        OVER (ORDER BY n.number) AS size, row_number() OVER (ORDER BY n.number) AS place
      FROM ended_run n WHERE n.schedule <> ALL (p_skip) ORDER BY n.number LIMIT 200) x
    WHERE x.size <= 4194304 OR x.place = 1)
  SELECT s.name, s.plan, coalesce(w.turn, 0), coalesce(w.record, ''),
    ARRAY(SELECT u.entry FROM change u WHERE u.schedule = s.name AND NOT u.told),
    c.numbers, c.kinds, c.tasks, c.ats, c.digests, c.vals, c.views, c.watches, c.errors
  FROM (
    SELECT z.schedule, array_agg(z.number ORDER BY z.number) AS numbers,
      array_agg(z.kind ORDER BY z.number) AS kinds, array_agg(z.task ORDER BY z.number) AS tasks,
      array_agg(wall_ns_of(z.at) ORDER BY z.number) AS ats,
      array_agg(z.digest ORDER BY z.number) AS digests,
      array_agg(z.value ORDER BY z.number) AS vals, array_agg(z.view ORDER BY z.number) AS views,
      array_agg(z.watch ORDER BY z.number) AS watches,
      array_agg(z.error ORDER BY z.number) AS errors
    FROM chosen z GROUP BY z.schedule) c
  JOIN schedule s ON s.name = c.schedule LEFT JOIN watched w ON w.schedule = c.schedule
  ORDER BY s.name;
END $$;

CREATE FUNCTION wall_ns_of(p_at timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE AS
  'SELECT (extract(epoch FROM p_at) * 1000000000)::bigint';

-- Take over what a node has found about runs of schedules; return the schedules for which it counts:
-- nobody else has judged one of their runs since it looked.
CREATE FUNCTION judged_1(p_names text[], p_turns bigint[], p_records bytea[], p_of text[],
  p_runs bigint[], p_entry_of text[], p_entry_numbers bigint[], p_changed bigint[],
  p_befores bigint[], p_entries bytea[], p_gone_of text[], p_gone bigint[], p_events text[],
  p_note_of text[], p_tasks text[], p_digests text[], p_note_entries bigint[],
  p_note_befores bigint[], p_ats bigint[], p_reasons text[], p_counts bigint[], p_pools text[])
RETURNS SETOF text LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE won text[];
BEGIN
  -- Nobody forgets these schedules meanwhile.
  SELECT array_agg(x.name ORDER BY x.name) INTO won FROM (
    SELECT s.name FROM schedule s WHERE s.name = ANY (p_names) AND s.notify
    ORDER BY s.name FOR KEY SHARE) x;
  INSERT INTO watched SELECT n, 0, '' FROM unnest(won) n ORDER BY n COLLATE "C" ON CONFLICT DO NOTHING;
  PERFORM FROM watched w WHERE w.schedule = ANY (won) ORDER BY w.schedule FOR UPDATE;
  won := ARRAY(
    SELECT w.schedule FROM unnest(p_names, p_turns) u(name, turn)
    JOIN watched w ON w.schedule = u.name AND w.turn = u.turn
    WHERE w.schedule = ANY (won) AND NOT EXISTS (  -- it was forgotten, and is there anew
      SELECT FROM unnest(p_of, p_runs) r(name, number) WHERE r.name = u.name AND NOT EXISTS (
        SELECT FROM ended_run n WHERE n.number = r.number)));
  UPDATE watched w SET turn = w.turn + 1, record = u.record
  FROM unnest(p_names, p_records) u(name, record)
  WHERE w.schedule = u.name AND w.schedule = ANY (won);
  DELETE FROM ended_run n WHERE n.number IN (
    SELECT r.number FROM unnest(p_of, p_runs) r(name, number) WHERE r.name = ANY (won));
  INSERT INTO history SELECT e.* FROM unnest(p_entry_of, p_entry_numbers, p_changed, p_befores,
    p_entries) e(name, number, changed_ns, before, entry) WHERE e.name = ANY (won)
  ON CONFLICT (schedule, number) DO UPDATE SET changed_ns = EXCLUDED.changed_ns,
    before = EXCLUDED.before, entry = EXCLUDED.entry;
  DELETE FROM history h USING unnest(p_gone_of, p_gone) g(name, number)
  WHERE g.name = ANY (won) AND h.schedule = g.name AND h.number = g.number;
  INSERT INTO change (event, schedule, task, digest, entry, before, at, at_ns, reason, count, pool)
  SELECT u.event, u.name, u.task, u.digest, u.entry, u.before, clock(), u.at, u.reason, u.count, u.pool
  FROM unnest(p_events, p_note_of, p_tasks, p_digests, p_note_entries, p_note_befores, p_ats,
    p_reasons, p_counts, p_pools) WITH ORDINALITY
    u(event, name, task, digest, entry, before, at, reason, count, pool, o)
  WHERE u.name = ANY (won) ORDER BY u.o;
  RETURN QUERY SELECT unnest(won);
END $$;

-- Entries of a schedule's history, oldest first: those of the numbers, or the newest. NULL instead of
-- them: there is no such schedule.
CREATE FUNCTION history_1(p_name text, p_numbers bigint[], p_limit int) RETURNS TABLE (entry bytea)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  IF NOT EXISTS (SELECT FROM schedule s WHERE s.name = p_name) THEN
    RETURN NEXT;
    RETURN;
  END IF;
  RETURN QUERY SELECT x.entry FROM (
    SELECT h.number, h.entry FROM history h WHERE h.schedule = p_name
      AND (p_numbers IS NULL OR h.number = ANY (p_numbers))
    ORDER BY h.number DESC LIMIT p_limit) x ORDER BY x.number;
END $$;

-- The newest changes that history keeps, of one schedule or all, newest first, at most 8 MiB of them.
CREATE FUNCTION changed_1(p_name text, p_limit int) RETURNS TABLE (schedule text, plan bytea,
  before bytea, after bytea) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN QUERY
  SELECT x.schedule, s.plan, x.before, x.entry FROM (
    SELECT h.schedule, h.changed_ns, b.entry AS before, h.entry,
      sum(octet_length(h.entry) + coalesce(octet_length(b.entry), 0))
        OVER (ORDER BY h.changed_ns DESC, h.schedule) AS size,
      row_number() OVER (ORDER BY h.changed_ns DESC, h.schedule) AS place
    FROM (SELECT * FROM history y WHERE y.changed_ns > 0 AND (p_name = '' OR y.schedule = p_name)
      ORDER BY y.changed_ns DESC LIMIT p_limit) h
    LEFT JOIN history b ON b.schedule = h.schedule AND b.number = h.before) x
  JOIN schedule s ON s.name = x.schedule
  WHERE x.size <= 8388608 OR x.place = 1 ORDER BY x.place;
END $$;

CREATE TYPE note AS (number bigint, schedule text, task text, digest text, announced bool,
  event text, entry bigint, before bigint, at_ns bigint, reason text, count bigint, pool text);

CREATE FUNCTION note_of(c change) RETURNS note LANGUAGE sql IMMUTABLE AS $$
  SELECT (c.number, c.schedule, c.task, c.digest, c.announced IS NOT NULL, c.event, c.entry,
    c.before, c.at_ns, c.reason, c.count, c.pool)::note $$;

-- Changes since a snapshot, each once, whatever order the transactions had; without one, the newest
-- of each schedule. The first row has no number, and says what to ask for next time.
CREATE FUNCTION changes_1(p_after text) RETURNS TABLE (after text, number bigint, schedule text,
  task text, digest text, announced bool, event text, entry bigint, before bigint, at_ns bigint,
  reason text, count bigint, pool text) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE since pg_snapshot := nullif(p_after, '')::pg_snapshot;
BEGIN
  after := pg_current_snapshot()::text;
  RETURN NEXT;
  RETURN QUERY SELECT ''::text, (note_of(c)).* FROM (
    (SELECT DISTINCT ON (x.schedule) x.* FROM change x WHERE since IS NULL
       AND x.event = 'task.changed'
     ORDER BY x.schedule, x.number DESC LIMIT 1000)
    UNION ALL
    (SELECT x.* FROM change x WHERE x.xact >= pg_snapshot_xmin(since)
       AND NOT pg_visible_in_snapshot(x.xact, since)
     ORDER BY x.number DESC LIMIT 1000)) c ORDER BY c.number;
END $$;

-- Changes that nobody has told, though there was time: whoever took them may be dead.
CREATE FUNCTION untold_1(p_age bigint) RETURNS SETOF note LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE before_ timestamptz := clock() - span(p_age);
BEGIN
  RETURN QUERY SELECT (note_of(c)).* FROM (
    SELECT x.* FROM change x WHERE NOT x.told AND coalesce(x.taken, x.at) <= before_
    ORDER BY x.number LIMIT 1000) c ORDER BY c.number;
END $$;

-- 1 for one token; 2 for who takes over from a token that is silent for so long; the same when they
-- ask again; 0 for the others, and for what is told.
CREATE FUNCTION announce_1(p_number bigint, p_token bigint, p_age bigint) RETURNS int
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE c change;
BEGIN
  SELECT * INTO c FROM change x WHERE x.number = p_number FOR UPDATE;
  IF NOT FOUND OR c.told THEN RETURN 0; END IF;
  IF c.announced = p_token THEN RETURN 1 + c.again::int; END IF;
  IF c.announced IS NOT NULL AND c.taken > clock() - span(p_age) THEN RETURN 0; END IF;
  UPDATE change x SET announced = p_token, taken = clock(), again = c.announced IS NOT NULL
  WHERE x.number = p_number;
  RETURN CASE WHEN c.announced IS NULL THEN 1 ELSE 2 END;
END $$;

CREATE FUNCTION told_1(p_numbers bigint[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM change c WHERE c.number = ANY (p_numbers) ORDER BY c.number FOR UPDATE;
  UPDATE change c SET told = true WHERE c.number = ANY (p_numbers);
END $$;
