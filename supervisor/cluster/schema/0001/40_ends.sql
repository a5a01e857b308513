-- Ends of attempts, and of tasks. Who calls these has locked the keys of the tasks (lock_keys).
-- States in `done`: 4 succeeded, 5 failed, 6 cancelled, 7 expired.

CREATE TYPE told AS (id text, waiter bigint, state smallint, lane int, held text, held_class text);

CREATE FUNCTION lock_keys(p_ids text[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF (SELECT count(v.key) FROM live v WHERE v.id = ANY (p_ids)) > 0 THEN
    PERFORM FROM key k WHERE k.key = ANY (ARRAY(SELECT v.key FROM live v WHERE v.id = ANY (p_ids)))
    ORDER BY k.key FOR UPDATE;
  END IF;
END $$;

-- The schedule that made this task.
CREATE FUNCTION schedule_of(p_id text) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT substr(p_id, 2, length(p_id) - 1 - position('.' IN reverse(p_id))) $$;

-- The last good result of such a task; NULL if there is none.
CREATE FUNCTION last_good(p_name text, p_key text, p_args bytea, p_owner oid) RETURNS bytea
LANGUAGE sql STABLE AS $$
  SELECT coalesce(
    (SELECT g.value FROM good g WHERE g.name = p_name
       AND g.key = good_key(p_name, p_key, p_args, p_owner) AND g.until > clock()),
    (SELECT (r.good).value FROM recent r WHERE r.name = p_name AND r.key = p_key)) $$;

CREATE FUNCTION falls_back(p_opts opts, p_name text, l lane) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT coalesce(nullif((p_opts).fallback_on, ''),
    (SELECT max(n.fallback_on) FROM node_task n WHERE n.name = p_name AND n.fallback_on <> ''),
    CASE WHEN l.target <> '' THEN (SELECT nullif(t.fallback_on, '') FROM target t
      WHERE t.target IN (l.target, '*') ORDER BY t.target = '*' LIMIT 1) END,
    (SELECT nullif(c.fallback_on, '') FROM class c WHERE c.name = l.class)) = 'failure' $$;

CREATE FUNCTION node_of(p_tenure int) RETURNS text LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN coalesce((SELECT n.name FROM node n WHERE n.tenure = p_tenure AND n.tenure <> 0), '');
END $$;

-- End one task, and nobody else. `p_fallback`: with the last good result, else with the fallback
-- of its submit, if there is one.
CREATE FUNCTION end_one(p_id text, e ending, p_fallback bool) RETURNS told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE v live; l lane; good bytea;
BEGIN
  DELETE FROM live x WHERE x.id = p_id RETURNING * INTO v;
  SELECT * INTO l FROM lane x WHERE x.lane = v.lane;
  IF e.state = 5 AND (p_fallback OR falls_back(v.opts, v.name, l)) AND NOT is_invalid(e.failure) THEN
    good := last_good(v.name, v.key, good_args(v.args, l.class), v.owner);
    IF good IS NOT NULL OR (v.opts).fallback IS NOT NULL THEN
      e.state := 4; e.value := coalesce(good, (v.opts).fallback);
      e.source := CASE WHEN good IS NULL THEN 'f' ELSE 's' END;
      IF p_fallback THEN e.failure := NULL; e.error := NULL; END IF;
    END IF;
  END IF;
  INSERT INTO done (id, finished_at, state, value, failure, error, attempts, crashes, run_ns, source,
    seq, pool, target, class, submitted_at, waiter, owner, name, priority, key, args, opts, failures,
    node)
  VALUES (v.id, clock(), e.state, e.value, e.failure, coalesce(e.error, v.error), e.attempts,
    v.crashes, e.run_ns, e.source, v.seq, l.pool, l.target, l.class, v.submitted_at, v.waiter,
    v.owner, v.name, v.priority, v.key, v.args, v.opts, v.failures, CASE WHEN v.tenure IS NOT NULL
      THEN node_of(v.tenure) ELSE coalesce(v.failures[cardinality(v.failures)].worker, '') END);
  INSERT INTO tally VALUES (l.pool, -1);
  IF v.id LIKE '@%' THEN PERFORM note_run(v.id, v.opts, e, v.error); END IF;
  IF is_login(l.class) THEN
    PERFORM login_over_1(session_of(l.class), v.id, CASE WHEN e.state <> 4 THEN coalesce(e.error,
      v.error, CASE e.state WHEN 6 THEN 'cancelled' WHEN 7 THEN 'expired' ELSE 'failed' END) END);
  END IF;
  RETURN (v.id, v.waiter, e.state, NULL::int, v.held, v.held_class)::told;
END $$;

-- End a task, and with it those that joined it, or let the next of them lead.
CREATE FUNCTION end_task(v live, e ending, p_fallback bool) RETURNS SETOF told
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE k key; mine told; other record; p policy;
BEGIN
  mine := end_one(v.id, e, p_fallback);
  RETURN NEXT mine;
  IF v.key IS NULL THEN RETURN; END IF;
  SELECT * INTO k FROM key x WHERE x.key = v.key AND x.leader = v.id;
  IF NOT FOUND THEN RETURN; END IF;
  IF e.state IN (6, 7) THEN
    SELECT x.id, x.waiter, x.lane INTO other FROM live x WHERE x.key = v.key AND x.state = 3
    ORDER BY x.seq LIMIT 1;
    IF NOT FOUND THEN DELETE FROM key x WHERE x.key = v.key; RETURN; END IF;
    UPDATE key x SET leader = other.id, forget = false WHERE x.key = v.key;
    UPDATE live x SET state = 2, ready_at = greatest(x.ready_at, clock()) WHERE x.id = other.id;
    RETURN NEXT (other.id, other.waiter, 0::smallint, other.lane, NULL, NULL)::told;
    RETURN;
  END IF;
  SELECT * INTO p FROM policy x ORDER BY x.version DESC LIMIT 1;
  IF e.source = '-' AND v.attempt + v.crashes > 0 AND NOT k.forget AND p.cache THEN
    INSERT INTO recent VALUES (v.name, v.key, e, k.since, CASE WHEN e.state = 4 THEN e END,
      CASE WHEN e.state = 4 THEN clock() END, clock())
    ON CONFLICT (name, key) DO UPDATE SET last = EXCLUDED.last, since = EXCLUDED.since,
      good = CASE WHEN (EXCLUDED.last).state = 4 THEN EXCLUDED.good ELSE recent.good END,
      good_at = coalesce(EXCLUDED.good_at, recent.good_at), noted_at = EXCLUDED.noted_at;
  END IF;
  DELETE FROM key x WHERE x.key = v.key;
  e.source := 'c';
  FOR other IN SELECT x.id FROM live x WHERE x.key = v.key AND x.state = 3 ORDER BY x.id LOOP
    RETURN NEXT end_one(other.id, e, false);
  END LOOP;
END $$;

-- Put a claimed task where it may be claimed again, unless it is over. It is queued by wake_1.
CREATE FUNCTION give_back(v live) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF v.cancel OR v.expires_at <= clock() THEN
    RETURN QUERY SELECT * FROM end_task(v, (CASE WHEN v.cancel THEN 6 ELSE 7 END, '', NULL, NULL,
      v.attempt, 0, '-')::ending, false);
    RETURN;
  END IF;
  UPDATE live x SET state = 2, ready_at = clock(), tenure = NULL, claim = NULL, begun = false,
    held = NULL, held_class = NULL, probe = 0, attempt = v.attempt, crashes = v.crashes,
    interruptions = v.interruptions
  WHERE x.id = v.id;
  RETURN NEXT (v.id, v.waiter, 0::smallint, v.lane, v.held, v.held_class)::told;
END $$;

-- The worker or the node died under a task.
CREATE FUNCTION crashed(v live) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE why text; most int;
BEGIN
  v.attempt := v.attempt - 1; v.crashes := v.crashes + 1;
  SELECT p.max_crashes INTO most FROM lane l JOIN pool p ON p.pool = l.pool WHERE l.lane = v.lane;
  IF v.crashes < most OR v.cancel THEN
    RETURN QUERY SELECT * FROM give_back(v);
    RETURN;
  END IF;
  why := format('quarantined: it was running each of the %s times its worker died', v.crashes);
  UPDATE live x SET crashes = v.crashes WHERE x.id = v.id;
  RETURN QUERY SELECT * FROM end_task(v, (5, '', failure('crash', 'PoisonTask', why),
    'PoisonTask: ' || why, v.attempt + v.crashes, 0, '-')::ending, false);
END $$;

CREATE FUNCTION noted(v live, p_worker text, p_failure bytea, p_error text) RETURNS live
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  v.error := p_error;
  v.failures := v.failures[greatest(1, coalesce(cardinality(v.failures), 0) - 8):]
    || (v.attempt, clock(), p_worker, p_failure)::failed;
  UPDATE live x SET error = v.error, failures = v.failures WHERE x.id = v.id;
  RETURN v;
END $$;

-- A failed attempt: the task's end, or another attempt after a pause, which the site pays for.
CREATE FUNCTION attempt_failed(v live, l lane, p_failure bytea, p_error text, p_run_ns bigint,
  p_retry_ns bigint, p_patience bigint, p_unwell bool) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE final smallint; ready timestamptz := clock() + span(p_retry_ns); paid bool;
BEGIN
  final := CASE WHEN v.cancel THEN 6 WHEN p_retry_ns < 0 THEN 5 WHEN v.expires_at <= clock() THEN 7 END;
  IF final IS NOT NULL THEN
    RETURN QUERY SELECT * FROM end_task(v, (final, '', p_failure, p_error, v.attempt, p_run_ns,
      '-')::ending, false);
    RETURN;
  END IF;
  paid := l.target = '' OR site_pays(l.target, l.class);
  UPDATE live x SET state = 2, ready_at = ready, tenure = NULL, claim = NULL, begun = false,
    held = NULL, held_class = NULL, probe = 0, counted = v.counted OR p_unwell, awaited = false,
    give_up_at = CASE WHEN NOT paid THEN ready + span(greatest(1, p_patience)) END
  WHERE x.id = v.id;
  RETURN NEXT (v.id, v.waiter, 0::smallint, NULL::int, v.held, v.held_class)::told;
END $$;

-- End attempts, fenced by tenure and claim. What is returned has counted; `lane` is given where the
-- task can be claimed again. kinds: 0 succeeded, 1 failed, 2 untouched, 3 interrupted, 4 crashed.
CREATE FUNCTION finish_1(p_tenure int, p_ids text[], p_claims bigint[], p_kinds smallint[],
  p_values bytea[], p_runs bigint[], p_failures bytea[], p_errors text[], p_unwell bool[],
  p_afters bigint[], p_retries bigint[], p_patience bigint[], p_clears text[], p_keeps bool[],
  p_views bytea[])
RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE u record; v live; l lane; node_ text := node_of(p_tenure); s site; slow bool; cleared text[];
  kept good[]; n int;
BEGIN
  PERFORM lock_keys(p_ids);
  SELECT bool_or(e.kind <> 0 OR x.key IS NOT NULL OR x.held IS NOT NULL OR x.held_class IS NOT NULL
    OR e.clears IS NOT NULL OR e.keeps OR x.id LIKE '@%' OR (
      SELECT (SELECT true FROM site z WHERE z.target = y.target LIMIT 1)
      FROM lane y WHERE y.lane = x.lane AND y.target <> '')) INTO slow
  FROM unnest(p_ids, p_kinds, p_clears, p_keeps) AS e(id, kind, clears, keeps)
  JOIN live x ON x.id = e.id;
  IF slow THEN
    PERFORM FROM live x
    WHERE x.id = ANY (p_ids) AND x.state + 0 = 1 AND x.tenure = p_tenure ORDER BY x.id FOR UPDATE;
  END IF;
  -- Most ends concern nobody else: all of them in one statement, in the order of their ids.
  RETURN QUERY
  WITH gone AS (
    DELETE FROM live x USING (
      SELECT * FROM unnest(p_ids, p_claims, p_kinds, p_values, p_runs, p_clears, p_keeps)
        AS e(id, claim, kind, value, run_ns, clears, keeps) ORDER BY e.id COLLATE "C") e
    WHERE x.id = e.id AND x.state + 0 = 1 AND x.tenure = p_tenure AND x.claim = e.claim
      AND e.kind = 0 AND x.key IS NULL AND e.clears IS NULL AND e.keeps IS NOT TRUE
      AND x.held IS NULL AND x.id NOT LIKE '@%'
      AND (x.held_class IS NULL OR x.id NOT LIKE 'login-%')  -- those of login tasks concern others
      AND (SELECT (SELECT true FROM site z WHERE z.target = y.target LIMIT 1)
        FROM lane y WHERE y.lane = x.lane AND y.target <> '') IS NULL
    RETURNING x.*, e.value, e.run_ns),
  counted AS (
    INSERT INTO tally SELECT y.pool, -count(*) FROM gone g JOIN lane y ON y.lane = g.lane
    GROUP BY y.pool),
  ended AS (
    INSERT INTO done (id, finished_at, state, value, error, attempts, crashes, run_ns, seq, pool,
      target, class, submitted_at, waiter, owner, name, priority, args, opts, failures, node)
    SELECT g.id, clock(), 4, coalesce(g.value, ''), g.error, g.attempt, g.crashes, g.run_ns, g.seq,
      y.pool, y.target, y.class, g.submitted_at, g.waiter, g.owner, g.name, g.priority, g.args,
      g.opts, g.failures, node_
    FROM gone g JOIN lane y ON y.lane = g.lane)
  SELECT g.id, g.waiter, 4::smallint, NULL::int, NULL::text, g.held_class FROM gone g;
  GET DIAGNOSTICS n = ROW_COUNT;
  IF slow IS NOT TRUE THEN
    -- A policy that was applied since may have given a site limits: such an end is told again.
    IF n < cardinality(p_ids) AND (
      SELECT true FROM unnest(p_ids, p_claims) e(id, claim), LATERAL (
        SELECT FROM live x WHERE x.id = e.id AND x.state + 0 = 1 AND x.tenure = p_tenure
          AND x.claim = e.claim) x LIMIT 1) THEN
      RAISE EXCEPTION 'a policy was applied at this moment' USING ERRCODE = '40001';
    END IF;
    RETURN;
  END IF;
  -- The others one by one, in the order of their sites, which they may have to lock.
  FOR u IN
    SELECT e.* FROM unnest(p_ids, p_claims, p_kinds, p_values, p_runs, p_failures, p_errors,
      p_unwell, p_afters, p_retries, p_patience, p_clears, p_keeps, p_views)
      AS e(id, claim, kind, value, run_ns, failure, error, unwell, retry_after, retry_ns, patience,
        clears, keeps, view)
    JOIN live x ON x.id = e.id AND x.state + 0 = 1 AND x.tenure = p_tenure AND x.claim = e.claim
    JOIN lane y ON y.lane = x.lane
    ORDER BY y.target, e.id
  LOOP
    SELECT * INTO v FROM live x
    WHERE x.id = u.id AND x.state + 0 = 1 AND x.tenure = p_tenure AND x.claim = u.claim;
    CONTINUE WHEN NOT FOUND;
    SELECT * INTO l FROM lane x WHERE x.lane = v.lane;
    IF u.failure IS NOT NULL THEN v := noted(v, node_, u.failure, u.error); END IF;
    IF l.target <> '' AND (u.kind = 0 OR (u.kind = 1 AND u.unwell)) THEN
      SELECT * INTO s FROM site x WHERE x.target = l.target;
      -- The retries of one task count once.
      IF u.kind = 0 OR NOT v.counted OR coalesce(v.probe <> 0 AND v.probe = s.round, false) THEN
        PERFORM site_heard(l.target, l.class, u.kind = 0, v.probe, u.run_ns, u.retry_after);
      END IF;
    END IF;
    IF u.kind = 0 THEN
      IF u.clears IS NOT NULL THEN cleared := cleared || u.clears; END IF;
      IF u.keeps THEN
        kept := kept || (v.name, good_key(v.name, v.key, good_args(v.args, l.class),
          v.owner), coalesce(u.value, ''),
          clock() + interval '7 days')::good;
      END IF;
      RETURN QUERY SELECT * FROM end_task(v, (4, coalesce(u.value, ''), NULL, NULL, v.attempt,
        u.run_ns, '-')::ending, false);
      IF u.view IS NOT NULL THEN PERFORM note_view(u.id, u.view); END IF;
    ELSIF u.kind = 1 THEN
      RETURN QUERY SELECT * FROM attempt_failed(v, l, u.failure, u.error, u.run_ns, u.retry_ns,
        u.patience, u.unwell);
    ELSIF u.kind = 2 THEN
      v.attempt := v.attempt - 1;
      RETURN QUERY SELECT * FROM give_back(v);
    ELSIF u.kind = 3 THEN
      v.attempt := v.attempt - 1; v.interruptions := v.interruptions + 1;
      IF v.interruptions <= 20 OR v.cancel THEN
        RETURN QUERY SELECT * FROM give_back(v);
      ELSE
        RETURN QUERY SELECT * FROM end_task(v, (5, '', failure('crash', '', format(
          'interrupted %s times by shutdowns or restarts', v.interruptions)), 'interrupted',
          v.attempt, 0, '-')::ending, false);
      END IF;
    ELSE
      RETURN QUERY SELECT * FROM crashed(v);
    END IF;
  END LOOP;
  IF cleared IS NOT NULL THEN
    PERFORM FROM state x WHERE x.key = ANY (cleared) ORDER BY x.key FOR UPDATE;
    DELETE FROM state x WHERE x.key = ANY (cleared);
  END IF;
  IF kept IS NOT NULL THEN
    INSERT INTO good SELECT DISTINCT ON (k.name, k.key) k.* FROM unnest(kept) k
    ORDER BY k.name, k.key, k.until DESC
    ON CONFLICT (name, key) DO UPDATE SET value = EXCLUDED.value, until = EXCLUDED.until;
  END IF;
END $$;
