-- Submits. Every check that tasks.sock makes is made here again.

-- What is locked in an order has that of bytes (COLLATE "C"), as the tables: a database has its own.
CREATE TYPE sent AS (o int, id text COLLATE "C", name text, args bytea, priority smallint,
  target text COLLATE "C", key text COLLATE "C", opts opts, waiter bigint, owner oid, pool int,
  class text COLLATE "C", refused text, why text);
CREATE TYPE verdict AS (o int, verdict text, code text, why text, retry_ns bigint, e ending,
  lanes int[], low bigint, hasten text[]);

CREATE FUNCTION bad(s sent) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE
    WHEN coalesce(length(s.id), 0) NOT BETWEEN 1 AND 64 THEN 'its id must have 1 to 64 characters'
    WHEN coalesce(length(s.name), 0) NOT BETWEEN 1 AND 200 THEN 'its name must have 1 to 200 characters'
    WHEN s.args IS NULL OR octet_length(s.args) > 4194304 THEN 'its arguments take more than 4 MiB'
    WHEN s.priority NOT BETWEEN 0 AND 3 THEN 'its priority must be from 0 to 3'
    WHEN length(s.target) > 253 THEN 'its target has more than 253 characters'
    WHEN length(unscoped(s.key)) > 200 THEN 'its key has more than 200 characters'
    WHEN (s.opts).timeout_ns NOT BETWEEN 0 AND 1::bigint << 62 THEN 'timeout is out of bounds'
    WHEN (s.opts).delay_ns NOT BETWEEN 0 AND 1::bigint << 62 THEN 'delay is out of bounds'
    WHEN (s.opts).expires_ns NOT BETWEEN 0 AND 1::bigint << 62 THEN 'expires is out of bounds'
    WHEN (s.opts).cache_ns NOT BETWEEN -1 AND 1::bigint << 62 THEN 'cache is out of bounds'
    WHEN (s.opts).debounce_ns NOT BETWEEN -1 AND 1::bigint << 62 THEN 'debounce is out of bounds'
    WHEN (s.opts).max_retries NOT BETWEEN -1 AND 1000 THEN 'max_retries must be from -1 to 1000'
    WHEN octet_length((s.opts).fallback) > 4194304 THEN 'its fallback takes more than 4 MiB'
    WHEN (s.opts).fallback_on NOT IN ('', 'open', 'failure') THEN 'fallback_on is open or failure'
    WHEN (s.opts).on_open NOT IN ('', 'wait', 'fail', 'fallback')
      THEN 'on_open is wait, fail or fallback'
    WHEN octet_length((s.opts).watch) > 8192 THEN 'its rules of what is watched take more than 8 KiB'
    WHEN length(s.class) > 65 THEN 'its session has more than 64 characters'
    WHEN length((s.opts).policy) > 32 THEN 'its class has more than 32 characters' END $$;

-- Delays beyond a hundred years are a hundred years: an interval has an end.
CREATE FUNCTION later(ns bigint) RETURNS timestamptz LANGUAGE sql AS
  'SELECT clock() + span(least(ns, 3155760000000000000))';

CREATE FUNCTION age_ns(asked bigint, declared bigint, of_pool bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN asked IS NULL THEN 0 WHEN asked <> -1 THEN asked
    WHEN declared > 0 THEN declared ELSE of_pool END $$;

-- What is remembered of a key, if it answers this submit.
CREATE FUNCTION remembered(s sent, p_alive bool) RETURNS ending LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE r recent; p pool; t node_task; rules policy; now_ timestamptz := clock();
BEGIN
  IF coalesce((s.opts).cache_ns, 0) = 0 AND coalesce((s.opts).debounce_ns, 0) = 0 THEN
    RETURN NULL;
  END IF;
  SELECT * INTO rules FROM policy x ORDER BY x.version DESC LIMIT 1;
  SELECT * INTO r FROM recent x WHERE x.name = s.name AND x.key = s.key;
  IF NOT FOUND OR NOT rules.cache THEN RETURN NULL; END IF;
  SELECT * INTO p FROM pool x WHERE x.pool = s.pool;
  SELECT * INTO t FROM node_task x WHERE x.name = s.name LIMIT 1;
  IF now_ - r.good_at < span(age_ns((s.opts).cache_ns, t.cache_ns, p.cache_ns)) THEN
    RETURN r.good;
  END IF;
  IF NOT p_alive AND rules.debounce
    AND now_ - r.since < span(age_ns((s.opts).debounce_ns, t.debounce_ns, p.debounce_ns)) THEN
    RETURN r.last;
  END IF;
  RETURN NULL;
END $$;

-- Everything that can be said about a batch without looking at what is queued.
CREATE FUNCTION checked(p_sent sent[]) RETURNS sent[] LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN (SELECT array_agg((x.o, x.id, x.name, x.args, x.priority, x.target, x.key, x.opts,
    x.waiter, x.owner, p.pool,
    coalesce(x.class, (x.opts).policy, CASE WHEN x.target <> '' THEN coalesce(t.class, d.class) END, ''),
    r.refused, r.why)::sent ORDER BY x.o)
  FROM unnest(p_sent) x
  LEFT JOIN pool p ON p.name = split_part(x.name, '.', 1)
  LEFT JOIN target t ON t.target = x.target
  LEFT JOIN target d ON d.target = '*'
  CROSS JOIN LATERAL bad(x) AS wrong,
  LATERAL (SELECT
    CASE WHEN wrong IS NOT NULL THEN 'InvalidTask'
      WHEN p.pool IS NULL OR NOT EXISTS (SELECT FROM node_task n WHERE n.name = x.name)
        THEN 'UnknownTask'
      WHEN (left(x.id, 1) = '@' OR x.class IS NOT NULL) AND only_mine() IS NOT NULL
        THEN 'InvalidTask'
      WHEN (x.opts).policy IS NOT NULL
        AND NOT EXISTS (SELECT FROM class c WHERE c.name = (x.opts).policy) THEN 'InvalidTask'
    END AS refused,
    CASE WHEN wrong IS NOT NULL THEN wrong WHEN p.pool IS NULL THEN
        format('no node has a pool for ''%s''; tasks are named POOL.METHOD', x.name)
      WHEN NOT EXISTS (SELECT FROM node_task n WHERE n.name = x.name) THEN
        format('no node has a task ''%s''', x.name)
      WHEN left(x.id, 1) = '@' AND only_mine() IS NOT NULL
        THEN 'ids that begin with @ are those of runs of schedules'
      WHEN x.class IS NOT NULL AND only_mine() IS NOT NULL
        THEN format('session ''%s'' is for programs on a node', session_of(x.class))
      ELSE format('there is no class ''%s''', (x.opts).policy) END AS why) r);
END $$;

CREATE FUNCTION has_room(p_pool int, p_priority int) RETURNS bool LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN (SELECT p.counted < p.queue_size - p.queue_size * CASE p_priority WHEN 0 THEN 0 WHEN 1 THEN 2
    ELSE 5 END / 100 FROM pool p WHERE p.pool = p_pool);
END $$;

CREATE FUNCTION queue_full(s sent) RETURNS verdict LANGUAGE sql IMMUTABLE AS $$
  SELECT (s.o, 'rejected', 'QueueFull', format('the queue of pool ''%s'' is full',
    split_part(s.name, '.', 1)), 1000000000, NULL, NULL, NULL, NULL)::verdict $$;

-- Give lanes to tasks; new ones are made.
CREATE FUNCTION lanes_for(p_sent sent[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO lane (pool, level, target, class, on_open)
  SELECT DISTINCT x.pool, x.priority, x.target, x.class, coalesce((x.opts).on_open, '')
  FROM unnest(p_sent) x
  WHERE x.refused IS NULL AND (
    SELECT true FROM lane l WHERE l.pool = x.pool AND l.level = x.priority AND l.target = x.target
      AND l.class = x.class AND l.on_open = coalesce((x.opts).on_open, '') LIMIT 1) IS NULL
  ORDER BY 1, 2, 3, 4, 5 ON CONFLICT DO NOTHING;
END $$;

-- Sites that the policy limits have a row from their first task on.
CREATE FUNCTION sites_for(p_lanes int[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  INSERT INTO site SELECT (s.row).* FROM (
    SELECT DISTINCT ON (l.target) site_as_new(l.target, l.class) AS row
    FROM lane l WHERE l.lane = ANY (p_lanes) AND l.target <> ''
      AND (SELECT true FROM site x WHERE x.target = l.target LIMIT 1) IS NULL
      AND ((SELECT t.limited FROM target t WHERE t.target IN (l.target, '*')
            ORDER BY t.target = '*' LIMIT 1)
        OR (SELECT p.windows FROM policy p ORDER BY p.version DESC LIMIT 1))
    ORDER BY l.target) s
  WHERE (s.row).limited ORDER BY (s.row).target ON CONFLICT DO NOTHING;
END $$;

-- Decide about all tasks that have keys. Whether there is room is asked once: the next look may see
-- another number, and a key must not be led by a task that is refused.
CREATE FUNCTION take_keyed(p_sent sent[], p_fresh bool) RETURNS SETOF verdict LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s sent; k key; e ending; n int; first text[] := '{}';
BEGIN
  FOREACH s IN ARRAY p_sent LOOP
    CONTINUE WHEN s.key IS NULL OR s.refused IS NOT NULL;
    SELECT * INTO k FROM key x WHERE x.key = s.key;
    IF k.leader IS NOT NULL AND k.name <> s.name THEN
      RETURN NEXT (s.o, 'rejected', 'InvalidTask', format('key ''%s'' is in use by a ''%s'': give '
        'each kind of task its own keys', unscoped(s.key), k.name), 0, NULL, NULL, NULL, NULL)::verdict;
      CONTINUE;
    END IF;
    e := NULL;
    IF NOT p_fresh THEN e := remembered(s, k.leader IS NOT NULL); END IF;
    IF e IS NOT NULL OR (e).state IS NOT NULL THEN
      INSERT INTO done (id, finished_at, state, value, failure, error, attempts, crashes, run_ns,
        source, seq, pool, target, class, submitted_at, waiter, owner, name, priority, key, args,
        opts)
      VALUES (s.id, clock(), e.state, e.value, e.failure, e.error, e.attempts, 0, e.run_ns, 'c',
        nextval('seq'), s.pool, s.target, s.class, clock(), s.waiter, s.owner, s.name, s.priority,
        s.key, s.args, s.opts);
      e.source := 'c';
      IF s.id LIKE '@%' THEN PERFORM note_run(s.id, s.opts, e, NULL); END IF;
      RETURN NEXT (s.o, 'answered', NULL, NULL, 0, e, NULL, NULL, NULL)::verdict;
      CONTINUE;
    END IF;
    IF k.leader IS NULL THEN
      IF NOT has_room(s.pool, s.priority) THEN RETURN NEXT queue_full(s); CONTINUE; END IF;
      UPDATE key x SET leader = s.id, name = s.name, since = clock() WHERE x.key = s.key;
    ELSE
      SELECT count(*) INTO n FROM live x WHERE x.key = s.key AND x.state = 3;
      n := n + (SELECT count(*) FROM unnest(p_sent) y WHERE y.id = ANY (first) AND y.key = s.key);
      IF n >= 1000 THEN
        RETURN NEXT (s.o, 'rejected', 'QueueFull', format('1000 tasks wait already for the result '
          'of key ''%s''', unscoped(s.key)), 1000000000, NULL, NULL, NULL, NULL)::verdict;
        CONTINUE;
      END IF;
      IF NOT has_room(s.pool, s.priority) THEN RETURN NEXT queue_full(s); CONTINUE; END IF;
      RETURN NEXT (s.o, 'joined', NULL, NULL, 0, NULL, NULL, NULL, ARRAY[k.leader])::verdict;
    END IF;
    first := first || s.id;
  END LOOP;
END $$;

-- What is known of tasks by their ids. Another body is another task, and so is one of another submitter.
CREATE FUNCTION known(p_sent sent[], p_resend bool) RETURNS verdict[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE own_ oid := only_mine();
BEGIN
  RETURN (SELECT array_agg(CASE WHEN k.name = x.name AND k.args = x.args
      AND (own_ IS NULL OR k.owner = own_)
    THEN (x.o, 'known', NULL, NULL, 0, k.e, NULL, NULL, NULL)::verdict
    ELSE (x.o, 'rejected', 'InvalidTask', format('task id ''%s'' is in use by a task with another '
      'body: submit with a new id', x.id), 0, NULL, NULL, NULL, NULL)::verdict END)
  FROM unnest(p_sent) x CROSS JOIN LATERAL (
    SELECT v.name, v.args, v.owner, NULL::ending AS e FROM live v WHERE v.id = x.id
    UNION ALL (
      SELECT d.name, d.args, d.owner,
        (d.state, d.value, d.failure, d.error, d.attempts, d.run_ns, d.source)::ending
      FROM done d WHERE p_resend AND d.id = x.id ORDER BY d.finished_at DESC LIMIT 1)
    LIMIT 1) k
  WHERE x.refused IS NULL);
END $$;

-- Of tasks that were to be put into `live`, those whose ids were there already: somebody else has
-- submitted them at the same moment. What was decided about keys holds for the same key alone; and
-- who has ended since `p_since` was not seen by who looked for it before. Else all is undone, and the
-- caller begins again.
CREATE FUNCTION late(p_sent sent[], p_inserted text[], p_since timestamptz) RETURNS verdict[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE late_ sent[]; ended bool; own_ oid := only_mine(); until timestamptz := clock();
BEGIN
  ended := (SELECT true FROM done d WHERE d.id = ANY (p_inserted) AND d.finished_at > p_since
    AND d.finished_at <= until AND d.xact <> pg_current_xact_id() LIMIT 1);
  IF ended IS NULL AND cardinality(p_inserted) = cardinality(p_sent) THEN RETURN NULL; END IF;
  SELECT array_agg(x) INTO late_ FROM unnest(p_sent) x
  WHERE x.id <> ALL (coalesce(p_inserted, '{}'));
  IF ended OR (SELECT true FROM unnest(late_) x WHERE NOT EXISTS (SELECT FROM live v
    WHERE v.id = x.id AND v.name = x.name AND v.args = x.args AND v.key IS NOT DISTINCT FROM x.key
      AND (own_ IS NULL OR v.owner = own_)) LIMIT 1) THEN
    RAISE EXCEPTION 'two have submitted the id of a task at the same moment' USING ERRCODE = '40001';
  END IF;
  RETURN known(late_, false);
END $$;

-- Take a batch: what is not accepted is returned, and at last one row (o = 0) with what to wake.
CREATE FUNCTION take_in(p_sent sent[], p_resend bool, p_fresh bool) RETURNS SETOF verdict LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  all_ sent[] := checked(p_sent); odd verdict[]; low bigint; lanes int[]; keyed bool;
  inserted text[]; urged text[]; firsts sent[]; twins sent[]; answered sent[];
  since timestamptz := clock() - interval '1 minute';
BEGIN
  SELECT array_agg((x.o, 'rejected', x.refused, x.why, 0, NULL, NULL, NULL, NULL)::verdict)
  INTO odd FROM unnest(all_) x WHERE x.refused IS NOT NULL;
  keyed := EXISTS (SELECT FROM unnest(all_) x WHERE x.key IS NOT NULL AND x.refused IS NULL);
  IF keyed THEN
    INSERT INTO key (key) SELECT DISTINCT x.key FROM unnest(all_) x
    WHERE x.key IS NOT NULL AND x.refused IS NULL ORDER BY 1
    ON CONFLICT (key) DO UPDATE SET forget = key.forget;
  END IF;
  -- Of one id the first is taken. What becomes of it is what is known of the others.
  IF (SELECT count(*) > count(DISTINCT x.id) FROM unnest(all_) x WHERE x.refused IS NULL) THEN
    SELECT array_agg(x ORDER BY x.o) INTO twins FROM unnest(all_) x WHERE x.refused IS NULL
      AND EXISTS (SELECT FROM unnest(all_) y WHERE y.id = x.id AND y.o < x.o AND y.refused IS NULL);
    SELECT array_agg(x ORDER BY x.o) INTO all_ FROM unnest(all_) x
    WHERE NOT EXISTS (SELECT FROM unnest(twins) y WHERE y.o = x.o);
  END IF;
  firsts := all_;
  odd := odd || known(all_, p_resend);
  IF keyed THEN
    odd := odd || (SELECT array_agg(t) FROM take_keyed(
      (SELECT coalesce(array_agg(x ORDER BY x.o), '{}') FROM unnest(all_) x
       WHERE NOT EXISTS (SELECT FROM unnest(odd) y WHERE y.o = x.o)), p_fresh) t);
  END IF;
  odd := odd || (SELECT array_agg(queue_full(x)) FROM unnest(all_) x
    WHERE x.refused IS NULL AND x.key IS NULL AND NOT has_room(x.pool, x.priority)
      AND NOT EXISTS (SELECT FROM unnest(odd) y WHERE y.o = x.o));
  IF odd IS NOT NULL THEN
    SELECT array_agg(x ORDER BY x.o) FILTER (WHERE w.verdict = 'answered'),
      array_agg(x ORDER BY x.o) FILTER (WHERE coalesce(w.verdict, 'joined') = 'joined')
    INTO answered, all_ FROM unnest(all_) x LEFT JOIN unnest(odd) w ON w.o = x.o;
  END IF;
  IF all_ IS NOT NULL OR answered IS NOT NULL THEN
    PERFORM pg_advisory_xact_lock_shared(@lock_8@, 0);  -- no lane is forgotten meanwhile
    PERFORM lanes_for(all_);
    -- What is answered holds its id for a moment: of two who submit it at once one waits here.
    WITH new AS (
      INSERT INTO live (id, seq, lane, state, submitted_at, queued_at, ready_at, expires_at, waiter,
        owner, asked, name, priority, key, args, opts)
      SELECT x.id, x.seq, x.lane,
        CASE WHEN x.joins THEN 3 WHEN (x.opts).delay_ns > 0 THEN 2 ELSE 0 END, clock(), clock(),
        CASE WHEN (x.opts).delay_ns > 0 THEN later((x.opts).delay_ns) END,
        CASE WHEN (x.opts).expires_ns > 0 THEN later((x.opts).expires_ns) END,
        x.waiter, x.owner, p_fresh OR x.id LIKE '@%m', x.name, x.priority,
        CASE WHEN x.lane > 0 THEN x.key END, x.args, x.opts
      FROM (
        SELECT y.*, nextval('seq') AS seq FROM (
          SELECT z.*, l.lane, EXISTS (SELECT FROM unnest(odd) w
            WHERE w.o = z.o AND w.verdict = 'joined') AS joins
          FROM unnest(all_) z JOIN lane l ON l.pool = z.pool AND l.level = z.priority
            AND l.target = z.target AND l.class = z.class
            AND l.on_open = coalesce((z.opts).on_open, '')
          UNION ALL SELECT z.*, 0, true FROM unnest(answered) z
          ORDER BY o) y) x
      ORDER BY x.id
      ON CONFLICT (id) DO NOTHING RETURNING id, seq, lane)
    SELECT array_agg(new.id), min(new.seq), array_agg(DISTINCT new.lane) FILTER (WHERE new.lane > 0)
    INTO inserted, low, lanes FROM new;
    odd := odd || late(all_ || answered, inserted, CASE WHEN p_fresh THEN 'infinity' ELSE since END);
    IF answered IS NOT NULL THEN
      DELETE FROM live v WHERE v.id = ANY (ARRAY(SELECT x.id FROM unnest(answered) x));
    END IF;
    PERFORM sites_for(lanes);
    IF cardinality(inserted) = coalesce(cardinality(all_), 0) THEN
      INSERT INTO tally SELECT x.pool, count(*) FROM unnest(all_) x GROUP BY x.pool;
    ELSE
      INSERT INTO tally SELECT x.pool, count(*) FROM unnest(all_) x
      WHERE x.id = ANY (inserted) GROUP BY x.pool;
    END IF;
  END IF;
  IF keyed THEN
    DELETE FROM key k WHERE k.leader IS NULL AND k.key IN (SELECT x.key FROM unnest(p_sent) x);
  END IF;
  IF twins IS NOT NULL THEN
    odd := odd || known(twins, true);
    odd := odd || (SELECT array_agg((x.o, w.verdict, w.code, w.why, w.retry_ns, NULL, NULL, NULL,
        NULL)::verdict)
      FROM unnest(twins) x JOIN unnest(firsts) y ON y.id = x.id AND y.refused IS NULL
      JOIN unnest(odd) w ON w.o = y.o
      WHERE NOT EXISTS (SELECT FROM unnest(odd) z WHERE z.o = x.o));
  END IF;
  PERFORM count_tasks_alone();
  SELECT array_agg(DISTINCT h) INTO urged FROM unnest(odd) y, unnest(y.hasten) h;
  RETURN QUERY SELECT * FROM unnest(odd) y ORDER BY y.o;
  RETURN NEXT (0, '', NULL, NULL, 0, NULL, lanes, low, urged)::verdict;
END $$;

CREATE FUNCTION submit_1(p_ids text[], p_names text[], p_args bytea[], p_priorities smallint[],
  p_targets text[], p_keys text[], p_timeouts bigint[], p_retries int[], p_delays bigint[],
  p_expires bigint[], p_caches bigint[], p_debounces bigint[], p_fallbacks bytea[],
  p_fallback_ons text[], p_policies text[], p_on_opens text[], p_watches bytea[],
  p_sessions text[], p_waiter bigint, p_resend bool)
RETURNS TABLE (o int, verdict text, code text, why text, retry_ns bigint, state smallint,
  value bytea, failure bytea, attempts int, run_ns bigint, source "char", lanes int[], low bigint,
  hasten text[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE all_ sent[]; keys text := scoped(''); owner_ oid := me();
BEGIN
  IF cardinality(p_ids) > 1000 THEN
    RAISE EXCEPTION 'more than 1000 tasks in one submit' USING ERRCODE = '22023';
  END IF;
  SELECT array_agg((u.o, u.id, u.name, u.args, coalesce(u.priority, 2), coalesce(u.target, ''),
    keys || u.key, CASE WHEN num_nonnulls(u.timeout, u.retries, u.delay, u.expires, u.cache, u.debounce,
      u.fallback, u.fallback_on, u.policy, u.on_open, u.watch) > 0 THEN (u.timeout, u.retries,
      u.delay, u.expires, u.cache, u.debounce, u.fallback, u.fallback_on, u.policy, u.on_open,
      u.watch)::opts END,
    p_waiter, owner_, NULL, CASE WHEN u.id LIKE 'login-%' AND EXISTS (
      SELECT FROM login_task t WHERE t.session = u.session AND t.task = u.id AND t.ok IS NULL)
      THEN login_class(u.session) ELSE session_class(u.session) END, NULL, NULL)::sent) INTO all_
  FROM unnest(p_ids, p_names, p_args, p_priorities, p_targets, p_keys, p_timeouts, p_retries,
    p_delays, p_expires, p_caches, p_debounces, p_fallbacks, p_fallback_ons, p_policies,
    p_on_opens, p_watches, p_sessions) WITH ORDINALITY AS u(id, name, args, priority, target, key,
      timeout, retries, delay, expires, cache, debounce, fallback, fallback_on, policy, on_open,
      watch, session, o);
  RETURN QUERY SELECT t.o, t.verdict, t.code, t.why, t.retry_ns, (t.e).state, (t.e).value,
    (t.e).failure, (t.e).attempts, (t.e).run_ns, (t.e).source, t.lanes, t.low, t.hasten
  FROM take_in(all_, p_resend, false) t;
END $$;

-- Run ended tasks again. What is not run is returned, and at last one row (o = 0) with what to wake.
CREATE FUNCTION retry_1(p_ids text[]) RETURNS TABLE (o int, code text, why text, retry_ns bigint,
  lanes int[], low bigint, hasten text[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE all_ sent[]; mine oid := only_mine(); t record;
BEGIN
  IF cardinality(p_ids) > 100 THEN
    RAISE EXCEPTION 'more than 100 tasks in one retry' USING ERRCODE = '22023';
  END IF;
  -- Of two retries at once the second sees what the first has made of the tasks.
  PERFORM FROM done x WHERE x.id = ANY (p_ids) ORDER BY x.id FOR UPDATE;
  FOR t IN
    SELECT u.id, u.o, d.id IS NOT NULL AS ended, v.id IS NOT NULL AS alive, d.state, (u.o, d.id,
      d.name, d.args, d.priority, d.target, d.key, d.opts, d.waiter, d.owner, NULL,
      session_class(session_of(d.class)), NULL, NULL)::sent AS s
    FROM unnest(p_ids) WITH ORDINALITY u(id, o)
    LEFT JOIN LATERAL (SELECT x.id FROM live x
      WHERE x.id = u.id AND (mine IS NULL OR x.owner = mine)) v ON true
    LEFT JOIN LATERAL (SELECT * FROM done x WHERE x.id = u.id AND (mine IS NULL OR x.owner = mine)
      ORDER BY x.finished_at DESC LIMIT 1) d ON true
    ORDER BY u.o
  LOOP
    o := t.o; retry_ns := 0; code := NULL;
    IF t.alive THEN
      code := 'NotEnded'; why := format('task ''%s'' has not ended', t.id);
    ELSIF NOT t.ended THEN
      code := 'NoSuchTask'; why := format('no such task: ''%s''', t.id);
    ELSIF t.state = 4 THEN
      code := 'NotFailed'; why := format('task ''%s'' has succeeded', t.id);
    ELSE
      all_ := all_ || t.s;
    END IF;
    IF code IS NOT NULL THEN RETURN NEXT; END IF;
  END LOOP;
  IF all_ IS NULL THEN RETURN; END IF;
  FOR t IN SELECT * FROM take_in(all_, false, true) LOOP
    o := t.o; code := t.code; why := t.why; retry_ns := t.retry_ns;
    lanes := t.lanes; low := t.low; hasten := t.hasten;
    IF t.verdict = 'rejected' THEN
      SELECT array_agg(x ORDER BY x.o) INTO all_ FROM unnest(all_) x WHERE x.o <> t.o;
    END IF;
    IF t.verdict = 'rejected' OR t.o = 0 THEN RETURN NEXT; END IF;
  END LOOP;
  DELETE FROM done x WHERE x.id = ANY (ARRAY(SELECT y.id FROM unnest(all_) y));
END $$;
