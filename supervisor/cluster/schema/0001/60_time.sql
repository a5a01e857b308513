-- What happens under the locks of pools: lanes come back, tasks become ready, tasks are withdrawn.

CREATE FUNCTION lock_pools(p_pools int[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM pg_advisory_xact_lock(@lock_1@, x.p) FROM (
    SELECT DISTINCT u.p FROM unnest(p_pools) u(p) ORDER BY 1) x;
END $$;

CREATE FUNCTION pools_of(p_ids text[]) RETURNS int[] LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN (SELECT array_agg(DISTINCT l.pool) FROM live v JOIN lane l ON l.lane = v.lane
  WHERE v.id = ANY (p_ids));
END $$;

-- Queue waiting tasks whose time has come, and bring their lanes back. Their pools are locked.
CREATE FUNCTION queue(p_ids text[]) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n int;
BEGIN
  WITH ready AS (
    UPDATE live v SET state = 0, queued_at = clock()
    WHERE v.id = ANY (p_ids) AND v.state + 0 = 2 AND v.ready_at <= clock() AND v.give_up_at IS NULL
    RETURNING v.lane, v.seq),
  woken AS (
    UPDATE lane x SET head = least(x.head, r.low - 1),
      state = CASE x.state WHEN 'e' THEN 'r' ELSE x.state END
    FROM (SELECT lane, min(seq) AS low FROM ready GROUP BY 1) r
    WHERE x.lane = r.lane AND (x.state = 'e' OR x.head >= r.low))
  SELECT count(*) INTO n FROM ready;
  RETURN n;
END $$;

-- Raise tasks to the level of the most urgent one that waits for them. Their pools are locked.
CREATE FUNCTION hasten(p_ids text[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE v record;
BEGIN
  IF p_ids IS NULL THEN RETURN; END IF;
  -- Lanes first, then tasks: as the lock order says.
  INSERT INTO lane (pool, level, target, class, on_open)
  SELECT DISTINCT l.pool, m.level, l.target, l.class, l.on_open FROM live v
  JOIN lane l ON l.lane = v.lane, LATERAL (
    SELECT min(x.priority) AS level FROM live x WHERE x.key = v.key) m
  WHERE v.id = ANY (p_ids) AND m.level < l.level ORDER BY 1, 2, 3, 4, 5 ON CONFLICT DO NOTHING;
  FOR v IN
    SELECT v.id, v.seq, n.lane FROM live v JOIN lane l ON l.lane = v.lane CROSS JOIN LATERAL (
      SELECT min(x.priority) AS level FROM live x WHERE x.key = v.key) m
    JOIN lane n ON n.pool = l.pool AND n.level = m.level AND n.target = l.target
      AND n.class = l.class AND n.on_open = l.on_open
    WHERE v.id = ANY (p_ids) AND m.level < l.level ORDER BY v.id
  LOOP
    UPDATE live x SET lane = v.lane WHERE x.id = v.id;
    UPDATE lane x SET head = least(x.head, v.seq - 1),
      state = CASE x.state WHEN 'e' THEN 'r' ELSE x.state END
    WHERE x.lane = v.lane;
  END LOOP;
END $$;

-- End queued tasks that do not wait for a shut site, some at a time. Their pools are locked.
CREATE FUNCTION end_impatient(p_lanes int[]) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE shut int[]; ids text[]; v live; how record; why text;
BEGIN
  SELECT array_agg(x.lane) INTO shut FROM (
    SELECT y.lane, y FROM lane y JOIN site s ON s.target = y.target AND is_shut(s, clock())
    WHERE y.lane = ANY (p_lanes) AND y.target <> '' OFFSET 0) x
  WHERE on_open_of(x.y) <> 'wait';
  IF shut IS NULL THEN RETURN; END IF;
  SELECT array_agg(x.id) INTO ids FROM (
    SELECT v.id FROM live v WHERE v.lane = ANY (shut) AND v.state = 0 LIMIT 1000) x;
  IF ids IS NULL THEN RETURN; END IF;
  PERFORM lock_keys(ids);
  FOR how IN
    SELECT x.id, y.target, on_open_of(y) AS on_open, s.state FROM live x
    JOIN lane y ON y.lane = x.lane JOIN site s ON s.target = y.target
    WHERE x.id = ANY (ids) AND x.state + 0 = 0 ORDER BY x.id
  LOOP
    SELECT * INTO v FROM live x WHERE x.id = how.id FOR UPDATE;
    why := format('the breaker of %s is open', how.target);
    RETURN QUERY SELECT * FROM end_task(v, (5, '', failure('open', 'BreakerOpen', why),
      'BreakerOpen: ' || why, v.attempt, 0, '-')::ending, how.on_open = 'fallback');
  END LOOP;
END $$;

CREATE FUNCTION on_open_of(l lane) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT coalesce(nullif(l.on_open, ''),
    (SELECT nullif(t.on_open, '') FROM target t WHERE t.target IN (l.target, '*')
     ORDER BY t.target = '*' LIMIT 1),
    (SELECT nullif(c.on_open, '') FROM class c WHERE c.name = l.class), 'wait') $$;

-- Let everybody know that these pools have work.
CREATE FUNCTION notify_pools(p_pools int[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM pg_notify(current_schema() || '_pool', p.name) FROM pool p WHERE p.pool = ANY (p_pools);
END $$;

-- After the commit of whatever changed it: lanes come back into the ring, tasks are queued or
-- hastened, nodes and those who wait (p_told) are told. It does not wait for the disk: tick_1 would do the same.
CREATE FUNCTION wake_1(p_lanes int[], p_low bigint, p_targets text[], p_classes text[],
  p_ready text[], p_hasten text[], p_known text[], p_waiter bigint, p_told bigint[])
RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE lanes int[]; pools int[]; ended bool := false; t told; mine oid := only_mine();
  before text := current_setting('synchronous_commit');
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  SELECT array_agg(l.lane) INTO lanes FROM lane l
  WHERE l.target = ANY (p_targets) AND l.target <> '';
  lanes := lanes || p_lanes;
  SELECT array_agg(l.pool) INTO pools FROM lane l WHERE l.lane = ANY (lanes);
  IF p_classes IS NOT NULL THEN
    pools := pools || ARRAY(SELECT l.pool FROM lane l
      WHERE l.class = ANY (p_classes) AND l.class <> '' AND l.state = 'p');
  END IF;
  pools := pools || pools_of(p_ready || p_hasten || p_known);
  PERFORM pg_notify(current_schema() || '_waiter_' || w, '') FROM unnest(p_told) w;
  IF pools IS NULL THEN RETURN; END IF;
  PERFORM lock_pools(pools);
  UPDATE lane x SET head = least(x.head, coalesce(p_low - 1, x.head)),
    wake_at = CASE WHEN x.target = ANY (p_targets) THEN NULL ELSE x.wake_at END,
    state = CASE WHEN x.state = 'e' OR x.target = ANY (p_targets) THEN 'r' ELSE x.state END
  WHERE x.lane = ANY (lanes) AND (x.head >= p_low OR x.state = 'e'
    OR (x.state = 'p' AND x.target = ANY (p_targets)));
  IF p_classes IS NOT NULL THEN   -- a lane for each place, in each pool; the most urgent first
    UPDATE lane x SET state = 'r' FROM (
      SELECT y.lane FROM unnest(p_classes) WITH ORDINALITY c(name, o), LATERAL (
        SELECT z.lane FROM (
          SELECT l.lane, row_number() OVER (PARTITION BY l.pool ORDER BY l.level, random()) AS n
          FROM lane l WHERE l.class = c.name AND l.class <> '' AND l.state = 'p'
            AND l.wake_at IS NULL) z
        WHERE z.n <= cardinality(p_classes)) y) w
    WHERE x.lane = w.lane;
  END IF;
  PERFORM hasten(p_hasten);
  IF p_known IS NOT NULL AND p_waiter <> 0 THEN
    UPDATE live v SET waiter = p_waiter
    WHERE v.id = ANY (p_known) AND v.waiter = 0 AND (mine IS NULL OR v.owner = mine);
  END IF;
  IF p_ready IS NOT NULL THEN PERFORM queue(p_ready); END IF;
  FOR t IN SELECT * FROM end_impatient(lanes || (
    SELECT array_agg(v.lane) FROM live v WHERE v.id = ANY (p_ready))) LOOP
    ended := true;
    RETURN NEXT t;
  END LOOP;
  IF ended THEN PERFORM set_config('synchronous_commit', before, true); END IF;
  PERFORM notify_pools(pools);
END $$;

-- Cancel tasks. A claimed one is only asked to stop (state -1): its node ends it.
CREATE FUNCTION cancel_1(p_ids text[]) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE v live; mine oid := only_mine();
BEGIN
  PERFORM lock_pools(pools_of(p_ids));
  PERFORM lock_keys(p_ids);
  FOR v IN SELECT * FROM live x WHERE x.id = ANY (p_ids) AND (mine IS NULL OR x.owner = mine)
    ORDER BY x.id FOR UPDATE
  LOOP
    IF v.state = 1 THEN
      UPDATE live x SET cancel = true WHERE x.id = v.id;
      PERFORM pg_notify(current_schema() || '_node_' || v.tenure, '');
      RETURN NEXT (v.id, v.waiter, -1::smallint, NULL::int, NULL, NULL)::told;
    ELSE
      -- It may have become the leader of its key by an end before.
      SELECT * INTO v FROM live x WHERE x.id = v.id;
      RETURN QUERY SELECT * FROM end_task(
        v, (6, '', NULL, NULL, v.attempt, 0, '-')::ending, false);
    END IF;
  END LOOP;
END $$;

-- -- what time brings: tick_1 is what a node calls, once or twice a second ------------------------

CREATE FUNCTION expire() RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE ids text[]; v live; now_ timestamptz := clock();
BEGIN
  SELECT array_agg(x.id) INTO ids FROM (SELECT v.id FROM live v
    WHERE v.expires_at <= now_ AND v.state <> 1 ORDER BY v.expires_at LIMIT 1000) x;
  IF ids IS NULL THEN RETURN; END IF;
  PERFORM lock_pools(pools_of(ids));
  PERFORM lock_keys(ids);
  FOR v IN SELECT * FROM live x WHERE x.id = ANY (ids) AND x.state <> 1 ORDER BY x.id FOR UPDATE LOOP
    SELECT * INTO v FROM live x WHERE x.id = v.id;
    RETURN QUERY SELECT * FROM end_task(
      v, (7, '', NULL, NULL, v.attempt, 0, '-')::ending, false);
  END LOOP;
END $$;

-- Retries that wait for the budget of their site: paid for, the most urgent first, or given up.
CREATE FUNCTION pay() RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE ids text[]; u record; v live; why text;
BEGIN
  SELECT array_agg(x.id) INTO ids FROM (SELECT v.id FROM live v
    WHERE v.state + 0 = 2 AND v.give_up_at IS NOT NULL LIMIT 1000) x;
  IF ids IS NULL THEN RETURN; END IF;
  PERFORM lock_keys(ids);
  PERFORM FROM live x WHERE x.id = ANY (ids) ORDER BY x.id FOR UPDATE;
  FOR u IN
    SELECT x.id, x.give_up_at, y.target, y.class FROM live x JOIN lane y ON y.lane = x.lane
    WHERE x.id = ANY (ids) AND x.state + 0 = 2 AND num_nulls(x.give_up_at) = 0
    ORDER BY y.target, y.level, x.seq
  LOOP
    IF site_pays(u.target, u.class) THEN
      UPDATE live x SET give_up_at = NULL WHERE x.id = u.id;
    ELSIF u.give_up_at <= clock() THEN
      SELECT * INTO v FROM live x WHERE x.id = u.id;
      why := format('%s (not tried again: the retry budget of %s is used up)', v.error, u.target);
      RETURN QUERY SELECT * FROM end_task(v, (5, '', failure('error', '', why), why, v.attempt, 0,
        '-')::ending, false);
    END IF;
  END LOOP;
END $$;

CREATE FUNCTION ready() RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE ids text[]; pools int[]; n int; now_ timestamptz := clock();
BEGIN
  SELECT array_agg(x.id) INTO ids FROM (SELECT v.id FROM live v
    WHERE v.state = 2 AND v.ready_at <= now_ AND v.give_up_at IS NULL
    ORDER BY v.ready_at LIMIT 5000) x;
  IF ids IS NULL THEN RETURN 0; END IF;
  pools := pools_of(ids);
  PERFORM lock_pools(pools);
  n := queue(ids);
  PERFORM notify_pools(pools);
  RETURN n;
END $$;

-- All nodes tick, twice a second each. What looks at every lane or site is done once for all.
CREATE FUNCTION is_turn(p_last regclass, p_ms int) RETURNS bool LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  now_ms bigint := extract(epoch FROM clock()) * 1000;
  last_ms bigint := coalesce(pg_sequence_last_value(p_last), 0);
BEGIN
  IF now_ms BETWEEN last_ms - 30000 AND last_ms + p_ms - 1 THEN RETURN false; END IF;
  PERFORM setval(p_last, now_ms);
  RETURN true;
END $$;

CREATE FUNCTION long_ms() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT 20';
-- Have a look take a twentieth of the time at most, for 30 s at most: while a snapshot is held open
-- it passes all dead rows of a lane, half a second for a million of them.
CREATE FUNCTION rest(p_last regclass, p_began timestamptz) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE took_ms bigint := extract(epoch FROM clock() - p_began) * 1000;
BEGIN
  IF took_ms > long_ms() THEN
    PERFORM setval(p_last, (extract(epoch FROM clock()) * 1000)::bigint
      + least(19 * took_ms, 30000) - 400);
  END IF;
END $$;

-- Lanes that nobody has woken: who should have died first.
CREATE FUNCTION repair() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE lanes int[]; pools int[]; began timestamptz := clock();
BEGIN
  IF NOT is_turn('repaired', 400) THEN RETURN; END IF;
  SELECT array_agg(l.lane) INTO lanes FROM lane l WHERE (l.state = 'e' AND (
      SELECT true FROM live v WHERE v.lane = l.lane AND v.state = 0 LIMIT 1))
    OR (l.head > 0 AND (
      SELECT true FROM live v WHERE v.lane = l.lane AND v.state = 0 AND v.seq <= l.head LIMIT 1))
    OR (l.state = 'p' AND l.wake_at IS NULL AND (
      SELECT true FROM site s WHERE s.target = l.target AND (
        s.state = 'forced-open' OR (s.max_concurrent > 0 AND s.max_concurrent <= (
          SELECT count(*) FROM live v WHERE v.held = s.target AND v.state + 0 = 1))
        OR (s.state = 'half-open' AND (s.breaker ->> 'probes')::int <= (
          SELECT count(*) FROM live v WHERE v.held = s.target AND v.state + 0 = 1
            AND v.probe = s.round))) LIMIT 1) IS NULL
      AND (SELECT true FROM class c WHERE c.name = l.class AND c.max_concurrent > 0
        AND c.max_concurrent <= (
          SELECT count(*) FROM live v WHERE v.held_class = c.name AND v.state + 0 = 1)
        LIMIT 1) IS NULL
      AND NOT (is_session(l.class) AND (coalesce((SELECT true FROM live v
          WHERE v.held_class = session_class(session_of(l.class)) AND v.state + 0 = 1 LIMIT 1), false)
        OR (NOT is_login(l.class) AND is_logging_in(session_of(l.class))))));
  PERFORM rest('repaired', began);
  IF lanes IS NOT NULL THEN
    SELECT array_agg(DISTINCT l.pool) INTO pools FROM lane l WHERE l.lane = ANY (lanes);
    PERFORM lock_pools(pools);
    UPDATE lane x SET state = 'r', wake_at = NULL, head = least(x.head, coalesce(
      (SELECT min(v.seq) - 1 FROM live v WHERE v.lane = x.lane AND v.state = 0), x.head))
    WHERE x.lane = ANY (lanes);
    PERFORM notify_pools(pools);
  END IF;
END $$;

-- Tasks that do not wait, at sites that are shut.
CREATE FUNCTION shut() RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE lanes int[]; pools int[];
BEGIN
  IF NOT is_turn('shut_seen', 400) THEN RETURN; END IF;
  SELECT array_agg(l.lane), array_agg(DISTINCT l.pool) INTO lanes, pools
  FROM site s JOIN lane l ON l.target = s.target AND l.target <> ''
  WHERE is_shut(s, clock()) AND on_open_of(l) <> 'wait'
    AND (SELECT true FROM live v WHERE v.lane = l.lane AND v.state = 0 LIMIT 1);
  IF lanes IS NOT NULL THEN
    PERFORM lock_pools(pools);
    RETURN QUERY SELECT * FROM end_impatient(lanes);
  END IF;
END $$;

-- Add up how many tasks the pools have. The caller has the lock of the part `tidy`.
CREATE FUNCTION count_tasks() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM pool p ORDER BY p.name FOR NO KEY UPDATE;  -- as nodes that declare them
  WITH c AS (DELETE FROM tally RETURNING *)
  UPDATE pool p SET counted = p.counted + x.n
  FROM (SELECT c.pool, sum(c.change) AS n FROM c GROUP BY 1) x WHERE p.pool = x.pool;
END $$;

-- The same for those who submit, where no node is alive: a queue has its limit all the same.
CREATE FUNCTION count_tasks_alone() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF is_turn('tidied', 5000) AND pg_try_advisory_xact_lock(@lock_4@, hashtext('tidy')) THEN
    PERFORM count_tasks();
  END IF;
END $$;

CREATE FUNCTION tidy() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE now_ timestamptz := clock(); week timestamptz := now_ - interval '7 days'; most int;
BEGIN
  PERFORM count_tasks();
  IF NOT is_turn('tidied', 400) THEN RETURN; END IF;
  UPDATE pool p SET aged = x.levels FROM (
    SELECT y.pool, ARRAY(SELECT g FROM generate_series(1, 3) g WHERE EXISTS (
      SELECT FROM lane l, LATERAL (
        SELECT v.queued_at FROM live v WHERE v.lane = l.lane AND v.seq > l.head AND v.state = 0
        ORDER BY v.lane, v.seq LIMIT 1) v
      WHERE l.pool = y.pool AND l.level = g AND l.state = 'r' AND v.queued_at <= clock() - y.aging))
      AS levels FROM pool y) x
  WHERE p.pool = x.pool AND p.aged <> x.levels;
  DELETE FROM site s WHERE s.ctid = ANY (ARRAY(
    SELECT x.ctid FROM site x WHERE NOT x.limited AND is_as_new(x)
      AND (x.share IS NULL OR (budget_at(x, clock())).units >= x.full_units)
      AND NOT EXISTS (SELECT FROM live v WHERE v.held = x.target)
    LIMIT 1000 FOR UPDATE SKIP LOCKED));
  SELECT p.cache_entries INTO most FROM policy p ORDER BY p.version DESC LIMIT 1;
  DELETE FROM recent r WHERE r.ctid = ANY (ARRAY(
    SELECT x.ctid FROM recent x JOIN (
      SELECT y.name, y.key FROM recent y ORDER BY y.noted_at DESC OFFSET most) old
    ON old.name = x.name AND old.key = x.key FOR UPDATE OF x SKIP LOCKED));
  DELETE FROM good g WHERE g.ctid = ANY (ARRAY(
    SELECT x.ctid FROM good x JOIN (
      SELECT y.name, y.key, row_number() OVER (ORDER BY y.until DESC) > most AS old FROM good y) o
    ON o.name = x.name AND o.key = x.key WHERE o.old OR x.until <= now_ FOR UPDATE OF x SKIP LOCKED));
  DELETE FROM state s WHERE s.ctid = ANY (ARRAY(
    SELECT x.ctid FROM state x WHERE x.until <= now_ LIMIT 1000 FOR UPDATE SKIP LOCKED));
  DELETE FROM change c WHERE c.at < week;
  DELETE FROM login l WHERE l.ctid = ANY (ARRAY(
    SELECT x.ctid FROM login x WHERE x.at < week FOR UPDATE SKIP LOCKED));
  DELETE FROM login_task t WHERE t.ctid = ANY (ARRAY(
    SELECT x.ctid FROM login_task x WHERE x.since < week FOR UPDATE SKIP LOCKED));
  PERFORM tidy_seen();
END $$;

-- Those of the lanes in which no task is, at most 5,000. State 1 has no index for lanes: it has few
-- tasks.
CREATE FUNCTION idle_lanes(p_lanes int[]) RETURNS int[] LANGUAGE sql STABLE AS $$
  SELECT array_agg(i.lane) FROM (
    SELECT l.lane FROM unnest(p_lanes) l(lane)
    WHERE (SELECT true FROM live v WHERE v.lane = l.lane AND v.state = 0 LIMIT 1) IS NULL
      AND (SELECT true FROM live v WHERE v.lane = l.lane AND abs(v.state) > 1 LIMIT 1) IS NULL
    EXCEPT SELECT v.lane FROM live v WHERE v.state = 1 LIMIT 5000) i $$;

-- Forget lanes without tasks, and limited sites that have none and are as new, if there are many:
-- each name of a site makes a lane, and repair() looks at all of them.
CREATE FUNCTION forget_lanes() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE idle int[] := idle_lanes(ARRAY(SELECT l.lane FROM lane l)); targets text[];
BEGIN
  IF coalesce(cardinality(idle), 0) < 1000 THEN RETURN; END IF;
  PERFORM set_config('lock_timeout', '100ms', true);  -- claims and submits wait behind this
  PERFORM lock_pools((SELECT array_agg(p.pool) FROM pool p));
  PERFORM pg_advisory_xact_lock(@lock_8@, 0);
  WITH gone AS (DELETE FROM lane l WHERE l.lane = ANY (idle_lanes(idle)) RETURNING l.target)
  SELECT array_agg(DISTINCT g.target) INTO targets FROM gone g WHERE g.target <> '';
  DELETE FROM site s WHERE s.ctid = ANY (ARRAY(
    SELECT x.ctid FROM site x WHERE x.target = ANY (targets) AND x.limited AND is_as_new(x)
      AND (x.tat IS NULL OR x.tat <= clock())
      AND (x.share IS NULL OR (budget_at(x, clock())).units >= x.full_units)
      AND (SELECT true FROM lane l WHERE l.target = x.target AND l.target <> '' LIMIT 1) IS NULL
    FOR UPDATE SKIP LOCKED));
EXCEPTION WHEN lock_not_available THEN RETURN;  -- the next one may have more luck
END $$;

CREATE FUNCTION tick_1(p_part text) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF NOT pg_try_advisory_xact_lock(@lock_4@, hashtext(p_part)) THEN RETURN; END IF;
  IF p_part = 'expire' THEN RETURN QUERY SELECT * FROM expire();
  ELSIF p_part = 'pay' THEN RETURN QUERY SELECT * FROM pay();
  ELSIF p_part = 'ready' THEN RETURN NEXT (NULL, 0, 0, ready(), NULL, NULL)::told;
  ELSIF p_part = 'repair' THEN PERFORM repair();
  ELSIF p_part = 'shut' THEN RETURN QUERY SELECT * FROM shut();
  ELSIF p_part = 'tidy' THEN PERFORM tidy();
  ELSIF p_part = 'lanes' THEN PERFORM forget_lanes();
  ELSE RAISE EXCEPTION 'there is no part %', p_part USING ERRCODE = '22023';
  END IF;
END $$;

-- -- retention ---------------------------------------------------------------------------------

CREATE FUNCTION add_partition(p_from timestamptz, p_to timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE name_ text := 'done_' || to_char(p_from AT TIME ZONE 'UTC', 'YYYYMMDDHH24');
BEGIN
  IF to_regclass(format('%I.%I', current_schema(), name_)) IS NOT NULL THEN RETURN; END IF;
  EXECUTE format('CREATE TABLE %I (LIKE done INCLUDING ALL)', name_);
  EXECUTE format('WITH moved AS (DELETE FROM done_rest WHERE finished_at >= %L AND finished_at < %L '
    'RETURNING *) INSERT INTO %I SELECT * FROM moved', p_from, p_to, name_);
  EXECUTE format('ALTER TABLE done ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
    name_, p_from, p_to);
END $$;

-- Make partitions ahead, each of three hours. A row that would go into the default partition while
-- its own is being made is refused; so they are made a day ahead, before anything ends there.
CREATE FUNCTION add_partitions() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE width interval := '3 hours'; at timestamptz;
BEGIN
  at := date_bin(width, clock(), '2000-01-01 00:00+00');
  FOR i IN 0 .. 8 LOOP
    PERFORM add_partition(at + i * width, at + (i + 1) * width);
  END LOOP;
END $$;

-- The same, unless somebody reads ended tasks for long: all others would stand in line behind this.
CREATE FUNCTION add_partitions_soon() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE before text := current_setting('lock_timeout');
BEGIN
  PERFORM set_config('lock_timeout', '500ms', true);
  PERFORM add_partitions();
  PERFORM set_config('lock_timeout', before, true);
EXCEPTION WHEN lock_not_available THEN RETURN;  -- ends go into the default partition; see retain_1
END $$;

-- Make partitions ahead, and drop those that are older than `p_keep` as a whole.
CREATE FUNCTION retain_1(p_keep bigint) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n int := 0; r record;
BEGIN
  IF NOT pg_try_advisory_xact_lock(@lock_6@, 0) THEN RETURN 0; END IF;
  PERFORM set_config('lock_timeout', '500ms', true);
  PERFORM add_partitions();
  FOR r IN SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'done'::regclass AND c.relname ~ '^done_\d{10}$'
      AND to_timestamp(substr(c.relname, 6) || '+00', 'YYYYMMDDHH24TZH') + interval '3 hours'
        <= clock() - span(p_keep)
  LOOP
    EXECUTE format('DROP TABLE %I', r.relname);
    n := n + 1;
  END LOOP;
  DELETE FROM done_rest d WHERE d.finished_at <= clock() - span(p_keep);
  -- Tasks that no node has any more, and nobody waits for: claims need not look for them.
  IF EXISTS (SELECT FROM known_task k WHERE NOT EXISTS (
    SELECT FROM node_task t WHERE t.name = k.name)) THEN
    DELETE FROM known_task k WHERE NOT EXISTS (SELECT FROM node_task t WHERE t.name = k.name)
      AND k.name <> ALL (coalesce((SELECT array_agg(DISTINCT v.name) FROM live v), '{}'));
  END IF;
  RETURN n;
END $$;
