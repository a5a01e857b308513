-- For those who wait, for handlers, and for people.

-- Ids that have ended for a waiter since a snapshot, each once, some at a time: what that snapshot
-- saw is left out, whatever order the transactions had. Between two portions `after` is
-- SINCE~UNTIL~XACT~ID: all that UNTIL saw and SINCE did not is told, up to here. Then it is UNTIL.
CREATE FUNCTION ended_1(p_waiter bigint, p_after text, p_limit int)
RETURNS TABLE (after text, ids text[], more bool) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
  mine oid := only_mine(); part text[] := string_to_array(p_after, '~');
  since pg_snapshot := nullif(part[1], '')::pg_snapshot;
  until pg_snapshot := coalesce(part[2]::pg_snapshot, pg_current_snapshot());
  low xid8 := coalesce(part[3]::xid8, pg_snapshot_xmin(since), '0'::xid8);
  last_id text COLLATE "C" := array_to_string(part[4:], '~'); xacts xid8[]; n int;
BEGIN
  more := false; after := until::text;
  IF p_waiter <> 0 THEN
    SELECT array_agg(x.id), array_agg(x.xact), count(*) INTO ids, xacts, n FROM (
      SELECT d.id, d.xact FROM done d
      WHERE d.waiter = p_waiter AND d.waiter <> 0 AND (mine IS NULL OR d.owner = mine)
        AND d.xact >= low AND (cardinality(part) < 4 OR (d.xact, d.id) > (low, last_id))
        AND (since IS NULL OR NOT pg_visible_in_snapshot(d.xact, since))
        AND pg_visible_in_snapshot(d.xact, until)
      ORDER BY d.xact, d.id LIMIT greatest(1, least(p_limit, 10000))) x;
    IF n = greatest(1, least(p_limit, 10000)) THEN
      more := true;
      after := concat_ws('~', coalesce(since::text, ''), until::text, xacts[n]::text, ids[n]);
    END IF;
  END IF;
  RETURN NEXT;
END $$;

CREATE FUNCTION look_up_1(p_ids text[]) RETURNS TABLE (id text, state smallint, value bytea,
  failure bytea, attempts int, run_ns bigint, source "char") LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE mine oid := only_mine();
BEGIN
  RETURN QUERY SELECT d.id, d.state, d.value, d.failure, d.attempts, d.run_ns, d.source
  FROM unnest(p_ids) WITH ORDINALITY u(i, o), LATERAL (
    SELECT * FROM done x WHERE x.id = u.i AND (mine IS NULL OR x.owner = mine)
    ORDER BY x.finished_at DESC LIMIT 1) d ORDER BY u.o;
END $$;

CREATE TYPE said AS (fraction real, progress text);

-- Results in order, as long as they take no more bytes than this. All is seen at one moment: a task
-- that ends meanwhile is alive or ended, and never absent. Those alive: how far they are.
CREATE FUNCTION fetch_1(p_ids text[], p_bytes bigint) RETURNS TABLE (id text, alive bool, size int,
  read bool, state smallint, value bytea, failure bytea, attempts int, run_ns bigint, source "char",
  fraction real, progress text) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE mine oid := only_mine();
BEGIN
  RETURN QUERY SELECT f.i, f.alive, f.size, f.total <= p_bytes, f.state,
    CASE WHEN f.total <= p_bytes THEN f.value END, f.failure, f.attempts, f.run_ns, f.source,
    (f.said).fraction, (f.said).progress
  FROM (
    SELECT u.i, u.o, v.id IS NOT NULL AS alive, coalesce(octet_length(d.value), 0) AS size,
      sum(coalesce(octet_length(d.value), 0)) OVER (ORDER BY u.o) AS total,
      v.id AS live, d.id AS ended, d.state, d.value, d.failure, d.attempts, d.run_ns, d.source,
      CASE WHEN v.state = 3 THEN (SELECT (x.fraction, x.progress)::said FROM key k
        JOIN live x ON x.id = k.leader WHERE k.key = v.key)
      WHEN v.id IS NOT NULL THEN (v.fraction, v.progress)::said END AS said
    FROM unnest(p_ids) WITH ORDINALITY u(i, o)
    LEFT JOIN live v ON v.id = u.i AND (mine IS NULL OR v.owner = mine)
    LEFT JOIN LATERAL (
      SELECT * FROM done x WHERE v.id IS NULL AND x.id = u.i AND (mine IS NULL OR x.owner = mine)
      ORDER BY x.finished_at DESC LIMIT 1) d ON true) f
  WHERE f.live IS NOT NULL OR f.ended IS NOT NULL ORDER BY f.o;
END $$;

CREATE TYPE seen AS (
  id text, name text, state smallint, priority smallint, target text, attempt int, crashes int,
  worker text, submitted float8, finished float8, run_ns bigint, failure bytea, value bytea,
  source "char", fraction real, progress text, args bytea,
  f_attempts int[], f_ats float8[], f_workers text[], f_failures bytea[]);

CREATE FUNCTION tasks_seen(p_ids text[], p_bodies bool) RETURNS SETOF seen LANGUAGE sql STABLE AS $$
  SELECT v.id, v.name, v.state, v.priority, l.target, v.attempt, v.crashes,
    coalesce((SELECT n.name FROM node n WHERE v.state = 1 AND n.tenure = v.tenure), ''),
    extract(epoch FROM v.submitted_at)::float8, 0::float8, 0::bigint, NULL::bytea, ''::bytea,
    '-'::"char", coalesce(w.fraction, v.fraction, 0), coalesce(w.progress, v.progress, ''),
    CASE WHEN p_bodies THEN v.args ELSE '' END, f.a, f.b, f.c, f.d
  FROM live v JOIN lane l ON l.lane = v.lane
  LEFT JOIN key k ON k.key = v.key AND v.state = 3 LEFT JOIN live w ON w.id = k.leader, LATERAL (
    SELECT array_agg(x.attempt), array_agg(extract(epoch FROM x.at)::float8), array_agg(x.worker),
      array_agg(x.failure) FROM unnest(v.failures) x) f(a, b, c, d)
  WHERE v.id = ANY (p_ids)
  UNION ALL
  SELECT v.id, v.name, v.state, v.priority, v.target, v.attempts, v.crashes, v.node,
    extract(epoch FROM v.submitted_at)::float8, extract(epoch FROM v.finished_at)::float8, v.run_ns,
    v.failure, CASE WHEN p_bodies THEN v.value ELSE '' END, v.source, 0, '',
    CASE WHEN p_bodies THEN v.args ELSE '' END, f.a, f.b, f.c, f.d
  FROM unnest(p_ids) u(i), LATERAL (
    SELECT * FROM done x WHERE x.id = u.i ORDER BY x.finished_at DESC LIMIT 1) v, LATERAL (
    SELECT array_agg(x.attempt), array_agg(extract(epoch FROM x.at)::float8), array_agg(x.worker),
      array_agg(x.failure) FROM unnest(v.failures) x) f(a, b, c, d)
  WHERE NOT EXISTS (SELECT FROM live w WHERE w.id = v.id) $$;

CREATE FUNCTION view_1(p_id text) RETURNS SETOF seen LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE mine oid := only_mine();
BEGIN
  RETURN QUERY SELECT * FROM tasks_seen(ARRAY[p_id], true) WHERE mine IS NULL
    OR EXISTS (SELECT FROM live v WHERE v.id = p_id AND v.owner = mine)
    OR EXISTS (SELECT FROM done d WHERE d.id = p_id AND d.owner = mine);
END $$;

-- Tasks that fit, newest first, live ones before the others. p_states are numbers as in `live` and
-- `done`; NULL: any; {-5}: failed ones that were not refused. Ended tasks are looked for in longer and longer times, so that the newest of
-- millions are found at once.
CREATE FUNCTION find_1(p_pool text, p_target text, p_states smallint[], p_error text, p_key text,
  p_schedule text, p_limit int) RETURNS SETOF seen LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE ids text[] := '{}'; more text[]; fits text; back interval;
BEGIN
  PERFORM set_config('enable_bitmapscan', 'on', true);  -- of done_time, within this function
  fits := format('(%L = '''' OR p.name = %L) AND (%L = '''' OR t.target = %L) AND (%L = '''' OR '
    'unscoped(x.key) = %L) AND (%L = '''' OR position(%L IN x.error) > 0) AND (%L = '''' OR '
    'starts_with(x.id, %L))', p_pool, p_pool, p_target, p_target, p_key, p_key, p_error, p_error,
    p_schedule, '@' || p_schedule || '.');
  IF p_states = '{-5}' THEN
    fits := fits || ' AND x.state = 5 AND NOT is_refused(x.failure)';
  ELSIF p_states IS NOT NULL THEN
    fits := fits || format(' AND x.state IN (%s)', array_to_string(p_states || '{-1}', ','));
  END IF;
  IF p_states IS NULL OR p_states && '{0,1,2,3}' THEN
    EXECUTE format('SELECT array_agg(y.id) FROM (SELECT x.id FROM live x JOIN lane t '
      'ON t.lane = x.lane JOIN pool p ON p.pool = t.pool WHERE %s ORDER BY x.seq DESC LIMIT %s) y',
      fits, p_limit) INTO more;
    ids := ids || more;
  END IF;
  IF p_states IS NULL OR p_states && '{4,5,6,7,-5}' THEN
    FOREACH back IN ARRAY '{10 s,5 min,1 h,6 h,100 y}'::interval[] LOOP
      EXECUTE format('SELECT array_agg(y.id) FROM (SELECT x.id FROM done x '
        'CROSS JOIN LATERAL (SELECT x.target) t JOIN pool p ON p.pool = x.pool WHERE %s '
        'AND x.finished_at > %L ORDER BY x.finished_at DESC LIMIT %s) y',
        fits, clock() - back, p_limit - cardinality(ids)) INTO more;
      EXIT WHEN cardinality(more) >= p_limit - cardinality(ids);
    END LOOP;
    ids := ids || more;
  END IF;
  RETURN QUERY SELECT s.* FROM unnest(ids) WITH ORDINALITY u(id, o)
    CROSS JOIN LATERAL tasks_seen(ARRAY[u.id], false) s ORDER BY u.o;
END $$;

-- Forget ended tasks, at most 10,000 at a time; NULL ids: all that fit.
CREATE FUNCTION purge_1(p_pool text, p_target text, p_states smallint[], p_error text, p_key text,
  p_schedule text, p_ids text[], p_older bigint) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n int; until timestamptz := clock() - span(p_older);
BEGIN
  WITH chosen AS (
    SELECT d.id, d.finished_at FROM done d JOIN pool p ON p.pool = d.pool
    WHERE (p_pool = '' OR p.name = p_pool) AND (p_target = '' OR d.target = p_target)
      AND (p_states IS NULL OR d.state = ANY (p_states)) AND (p_key = '' OR unscoped(d.key) = p_key)
      AND (p_error = '' OR position(p_error IN d.error) > 0)
      AND (p_schedule = '' OR starts_with(d.id, '@' || p_schedule || '.'))
      AND (p_ids IS NULL OR d.id = ANY (p_ids)) AND d.finished_at <= until LIMIT 10000)
  DELETE FROM done d USING chosen c WHERE d.id = c.id AND d.finished_at = c.finished_at;
  GET DIAGNOSTICS n = ROW_COUNT;
  RETURN n;
END $$;

-- For each pool: tasks that succeeded and failed within a time of at most ten seconds, and how many
-- failed ones that were not refused are kept, of the newest 10,000 of all pools.
CREATE FUNCTION recent_1(p_span bigint) RETURNS TABLE (pool text, succeeded bigint, failed bigint,
  dead bigint) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE since timestamptz := clock() - least(span(p_span), interval '10 s');
BEGIN
  PERFORM set_config('enable_bitmapscan', 'on', true);
  RETURN QUERY WITH ended AS (
    SELECT d.pool, count(*) FILTER (WHERE d.state = 4) AS good,
      count(*) FILTER (WHERE d.state = 5) AS bad
    FROM done d WHERE d.finished_at > since GROUP BY 1), kept AS (
    SELECT f.pool, count(*) FILTER (WHERE NOT is_refused(f.failure)) AS tasks FROM (
      SELECT d.pool, d.failure FROM done d WHERE d.state = 5
      ORDER BY d.finished_at DESC LIMIT 10000) f
    GROUP BY 1)
  SELECT p.name, coalesce(e.good, 0), coalesce(e.bad, 0), coalesce(k.tasks, 0)
  FROM pool p LEFT JOIN ended e ON e.pool = p.pool LEFT JOIN kept k ON k.pool = p.pool
  ORDER BY p.name;
END $$;

-- Live tasks by lane and state; a join per task would take seconds for a million.
CREATE FUNCTION counted() RETURNS TABLE (lane int, state smallint, tasks bigint) LANGUAGE sql STABLE AS $$
  SELECT v.lane, 0::smallint, count(*) FROM live v WHERE v.state = 0 GROUP BY 1
  UNION ALL SELECT v.lane, 1::smallint, count(*) FROM live v WHERE v.state = 1 GROUP BY 1
  UNION ALL SELECT v.lane, 2::smallint, count(*) FROM live v WHERE v.state = 2 GROUP BY 1
  UNION ALL SELECT v.lane, 2::smallint, count(*) FROM live v
    WHERE v.state = 3 AND v.key IS NOT NULL GROUP BY 1 $$;

CREATE FUNCTION counts_1() RETURNS TABLE (pool text, level smallint, state smallint, tasks bigint)
LANGUAGE sql STABLE AS $$
  SELECT p.name, l.level, c.state, sum(c.tasks)::bigint
  FROM counted() c JOIN lane l ON l.lane = c.lane JOIN pool p ON p.pool = l.pool
  GROUP BY 1, 2, 3 $$;

-- What one look at everything finds, as JSON of engine.Statistics. Snapshots of others are seen only
-- by an owner of the schema who is a superuser or has pg_read_all_stats.
CREATE FUNCTION look() RETURNS jsonb LANGUAGE sql STABLE AS $$
  WITH c AS MATERIALIZED (
    SELECT p.name AS pool, l.level, l.lane, l.head, l.state = 'p' AS parked, x.state, x.tasks
    FROM counted() x JOIN lane l ON l.lane = x.lane JOIN pool p ON p.pool = l.pool)
  SELECT jsonb_build_object(
    'oldest_snapshot_ns', greatest(0, coalesce((
      SELECT ns(clock_timestamp() - min(a.xact_start)) FROM pg_stat_activity a
      WHERE a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid()
        AND a.backend_type <> 'autovacuum worker'), 0), coalesce((
      SELECT ns(clock_timestamp() - min(x.prepared)) FROM pg_prepared_xacts x), 0)),
    'dead_tuples', coalesce((
      SELECT s.n_dead_tup FROM pg_stat_user_tables s WHERE s.relid = 'live'::regclass), 0),
    'live_bytes', pg_total_relation_size('live'),
    'counts', coalesce((SELECT jsonb_agg(jsonb_build_object('pool', x.pool, 'level', x.level, 'state',
        CASE x.state WHEN 0 THEN 'queued' WHEN 1 THEN 'running' ELSE 'waiting' END, 'tasks', x.tasks)
        ORDER BY x.pool, x.level, x.state)
      FROM (SELECT c.pool, c.level, c.state, sum(c.tasks) AS tasks FROM c GROUP BY 1, 2, 3) x), '[]'),
    'backlogs', coalesce((SELECT jsonb_agg(jsonb_build_object('pool', x.name, 'level', x.level,
        'ready', x.ready, 'waited_ns', greatest(0, ns(clock() - x.oldest))) ORDER BY x.name, x.level)
      FROM (
        SELECT c.pool AS name, c.level, sum(c.tasks) AS ready, min(h.queued_at) AS oldest
        FROM c, LATERAL (
          SELECT v.queued_at FROM live v WHERE v.lane = c.lane AND v.seq > c.head AND v.state = 0
          ORDER BY v.lane, v.seq LIMIT 1) h
        WHERE c.state = 0 AND NOT c.parked GROUP BY 1, 2) x), '[]'),
    'nodes', coalesce((SELECT jsonb_agg(jsonb_build_object('name', n.name, 'tenure', n.tenure,
        'alive', is_alive(n), 'draining', n.draining, 'software', n.software,
        'beat_age_ns', greatest(0, ns(clock() - n.beat)),
        'claims', (SELECT count(*) FROM live v WHERE v.state = 1 AND v.tenure = n.tenure),
        'pools', coalesce((SELECT jsonb_agg(p.name ORDER BY p.name) FROM pool p WHERE EXISTS (
          SELECT FROM node_task t WHERE t.identity = n.identity AND t.pool = p.pool)), '[]'))
        ORDER BY n.name) FROM node n), '[]')) $$;

-- The figures of the cluster, at most `p_age` old. One node in turn looks, the others read. A look
-- that takes long is made less often: looks take a twentieth of the time at most.
CREATE FUNCTION statistics_1(p_age bigint) RETURNS TABLE (age bigint, doc text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE f figures; begun timestamptz := clock_timestamp();
BEGIN
  SELECT * INTO f FROM figures;
  IF p_age <= 0 THEN
    RETURN QUERY SELECT 0::bigint, look()::text;
  ELSIF f.at > clock() - greatest(span(p_age), 20 * f.took)
    OR NOT pg_try_advisory_xact_lock(@lock_4@, 0)
  THEN
    RETURN QUERY SELECT greatest(0, ns(clock() - f.at)), f.doc WHERE f.at IS NOT NULL;
  ELSE
    PERFORM set_config('synchronous_commit', 'off', true);
    f.doc := look()::text;
    INSERT INTO figures (at, doc, took) VALUES (clock(), f.doc, clock_timestamp() - begun)
      ON CONFLICT (one) DO UPDATE SET at = EXCLUDED.at, doc = EXCLUDED.doc, took = EXCLUDED.took;
    RETURN QUERY SELECT 0::bigint, f.doc;
  END IF;
END $$;

CREATE FUNCTION invalidate_1(p_key text, p_prefix bool) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  p_key := scoped(p_key);
  UPDATE key k SET forget = true WHERE k.key IN (
      SELECT x.key FROM key x WHERE CASE WHEN p_prefix THEN starts_with(x.key, p_key)
        ELSE x.key = p_key END ORDER BY x.key FOR UPDATE)
    AND EXISTS (SELECT FROM live v WHERE v.id = k.leader AND (v.state = 1 OR v.attempt > 0));
  DELETE FROM recent r WHERE CASE WHEN p_prefix THEN starts_with(r.key, p_key)
    ELSE r.key = p_key END;
  DELETE FROM good g WHERE CASE WHEN p_prefix THEN starts_with(g.key, p_key)
    ELSE g.key = p_key END;
END $$;

-- What nodes publish, for those who submit without a node.
-- Nothing if that is as it was at p_seen.
CREATE FUNCTION cards_1(p_seen text) RETURNS TABLE (stamp text, card bytea) LANGUAGE sql STABLE AS $$
  SELECT s.stamp, n.card FROM (
    SELECT md5(coalesce(string_agg(md5(x.card), ' ' ORDER BY x.identity), ''))
    FROM node x) s(stamp) LEFT JOIN node n ON true
  WHERE s.stamp IS DISTINCT FROM p_seen ORDER BY n.name $$;

-- -- schedules ---------------------------------------------------------------------------------

CREATE FUNCTION wall_ns() RETURNS bigint LANGUAGE sql AS
  'SELECT (extract(epoch FROM clock()) * 1000000000)::bigint';

-- The runs of a schedule that have not ended: the newest, whether all were attempted and wait for
-- another attempt, and the newest that a person asked for. With more than 100 not all are looked at.
CREATE FUNCTION runs_alive(p_name text) RETURNS TABLE (alive text, retrying bool, asked text)
LANGUAGE sql STABLE AS $$
  SELECT coalesce(max(x.id), ''),
    coalesce(count(*) <= 100 AND bool_and(x.state = 2 AND x.attempt > 0), false),
    coalesce(max(x.id) FILTER (WHERE x.asked), '')
  FROM (SELECT v.id, v.state, v.attempt, v.asked FROM live v
    WHERE v.id > ('@' || p_name || '.') COLLATE "C" AND v.id < ('@' || p_name || '/') COLLATE "C"
    ORDER BY v.id DESC LIMIT 101) x $$;

CREATE FUNCTION due_1() RETURNS TABLE (name text, plan bytea, turn bigint, last_ns bigint,
  now_ns bigint, memory bytea, alive text, retrying bool, asked text) LANGUAGE sql STABLE AS $$
  SELECT s.name, s.plan, s.turn, s.last_ns, wall_ns(), s.memory, a.alive, a.retrying, a.asked
  FROM schedule s, runs_alive(s.name) a WHERE s.next_ns <= wall_ns() AND NOT s.paused
  ORDER BY s.name $$;

-- Move a schedule on from a turn; the node submits its runs in the same transaction. NULL: another
-- node was first. p_keys: those of the runs, if runs that wait for a retry end for them (make_way_1):
-- then the keys of all of them are locked here, in their order, and returned.
CREATE FUNCTION settle_1(p_name text, p_turn bigint, p_last bigint, p_next bigint, p_memory bytea,
  p_skipped bigint, p_anew bool, p_keys text[]) RETURNS text[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE keys text[] := '{}';
BEGIN
  UPDATE schedule s SET turn = s.turn + 1, last_ns = p_last, next_ns = p_next, memory = p_memory,
    skipped = s.skipped + p_skipped
  WHERE s.name = p_name AND s.turn = p_turn;
  IF NOT FOUND THEN RETURN NULL; END IF;
  IF p_anew THEN
    INSERT INTO ended_run (schedule, kind, task, at, digest)
    SELECT s.name, 2, '', clock(), '' FROM schedule s WHERE s.name = p_name AND s.notify;
  END IF;
  IF p_keys IS NOT NULL THEN
    keys := p_keys || ARRAY(SELECT v.key FROM live v WHERE v.id > ('@' || p_name || '.') COLLATE "C"
      AND v.id < ('@' || p_name || '/') COLLATE "C" AND num_nonnulls(v.key) > 0);
    INSERT INTO key (key) SELECT DISTINCT u.key COLLATE "C" FROM unnest(keys) u(key) ORDER BY 1
    ON CONFLICT (key) DO UPDATE SET forget = key.forget;
  END IF;
  RETURN keys;
END $$;

-- After the submit, in the same transaction: runs that wait for a retry end for new ones, or the one
-- that a person asked for is hastened. No row: they do not wait any more, and the transaction has to
-- be undone. A hastened run is queued after the commit, which takes the lock of its pool.
CREATE FUNCTION make_way_1(p_name text, p_new text[], p_keys text[], p_hastens bool)
RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  ids text[]; asked_ text; retrying_ bool; v live;
  why text := format('not tried again: the next run of schedule ''%s'' is due', p_name);
BEGIN
  SELECT array_agg(x.id) INTO ids FROM live x WHERE x.id > ('@' || p_name || '.') COLLATE "C"
    AND x.id < ('@' || p_name || '/') COLLATE "C" AND x.id <> ALL (p_new);
  PERFORM FROM live x WHERE x.id = ANY (ids) ORDER BY x.id FOR UPDATE;
  SELECT max(x.id) FILTER (WHERE x.asked), bool_and(x.state + 0 = 2 AND x.attempt > 0)
  INTO asked_, retrying_ FROM live x WHERE x.id = ANY (ids);
  IF NOT coalesce(retrying_, true) OR (num_nonnulls(asked_) > 0) <> p_hastens THEN RETURN; END IF;
  RETURN NEXT (NULL, 0, 0, NULL, NULL, NULL)::told;
  IF p_hastens THEN
    RETURN QUERY UPDATE live x SET ready_at = clock(), give_up_at = NULL WHERE x.id = asked_
      RETURNING x.id, x.waiter, 0::smallint, x.lane, NULL::text, NULL::text;
  ELSIF cardinality(p_new) > 0 THEN
    FOR v IN SELECT * FROM live x WHERE x.id = ANY (ids) ORDER BY x.id LOOP
      SELECT * INTO v FROM live x WHERE x.id = v.id;
      RETURN QUERY SELECT * FROM end_task(v, (6, '', failure('cancel', '', why), 'cancel: ' || why,
        v.attempt, 0, '-')::ending, false);
    END LOOP;
  END IF;
  DELETE FROM key k WHERE k.leader IS NULL AND k.key = ANY (p_keys);  -- nobody has used them
END $$;

-- What became of the runs that were submitted, in the transaction of settle_1.
CREATE FUNCTION ran_1(p_name text, p_runs bigint, p_skipped bigint, p_task text, p_ran bigint)
RETURNS void LANGUAGE sql AS $$
  UPDATE schedule s SET runs = s.runs + p_runs, skipped = s.skipped + p_skipped,
    task = coalesce(p_task, s.task), ran_ns = coalesce(p_ran, s.ran_ns)
  WHERE s.name = p_name $$;

-- Instants of a pause are not caught up with: a node finds the next one.
CREATE FUNCTION pause_1(p_name text, p_paused bool) RETURNS bool LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE schedule s SET paused = p_paused, turn = s.turn + 1,
    last_ns = CASE WHEN p_paused OR s.last_ns = 0 THEN s.last_ns
      ELSE greatest(s.last_ns, wall_ns()) END,
    next_ns = CASE WHEN p_paused OR s.next_ns IS NULL THEN s.next_ns ELSE 0 END
  WHERE s.name = p_name AND s.paused <> p_paused;
  RETURN FOUND OR EXISTS (SELECT FROM schedule s WHERE s.name = p_name);
END $$;
