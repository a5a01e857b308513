-- Claims: strict between levels, in turn between lanes, through the gates of sites and classes.

CREATE TYPE granted AS (
  id text, claim bigint, attempt int, crashes int, interruptions int, class text, probe bool,
  expires_in bigint, name text, args bytea, priority smallint, target text, key text,
  timeout_ns bigint, max_retries int, delay_ns bigint, expires_ns bigint, cache_ns bigint,
  debounce_ns bigint, fallback bytea, fallback_on text, policy text, on_open text, watch bytea,
  session text);

-- What a retry budget has, after time has earned its part.
CREATE FUNCTION budget_at(s site, now_ timestamptz) RETURNS site LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE every numeric := s.every_ns / 1000; more numeric;
BEGIN
  IF s.share IS NULL OR s.share = 0 OR every = 0 OR s.units >= s.full_units THEN
    s.earned_at := now_;
    RETURN s;
  END IF;
  more := floor(extract(epoch FROM now_ - s.earned_at) * 1000000 * 1000000 / every);
  s.earned_at := s.earned_at + make_interval(secs => ceil(more * every / 1000000) / 1e6);
  s.units := least(s.full_units, s.units + more);
  RETURN s;
END $$;

-- The first tasks of a lane that a node has, which lacks others. A task that is not near is looked
-- for by its name: the lane may be full of those that the node lacks.
CREATE FUNCTION claimable(p_lane int, p_head bigint, p_names text[], p_count int)
RETURNS TABLE (c tid, seq bigint, queued_at timestamptz, earned bool) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE now_ timestamptz := clock(); got int; near int; far bigint; reach int := p_count + 16;
BEGIN
  SELECT count(*), max(x.seq), count(*) FILTER (WHERE x.name = ANY (p_names)) INTO near, far, got
  FROM (
    SELECT v.seq, v.name FROM live v WHERE v.lane = p_lane AND v.seq > p_head AND v.state = 0
    ORDER BY v.lane, v.seq LIMIT reach) x;
  IF got > 0 THEN
    RETURN QUERY SELECT v.ctid, v.seq, v.queued_at, v.earned FROM live v
    WHERE v.lane = p_lane AND v.seq > p_head AND v.seq <= far AND v.state = 0
      AND (v.expires_at IS NULL OR v.expires_at > now_) AND v.name = ANY (p_names)
    ORDER BY v.lane, v.seq LIMIT p_count;
    GET DIAGNOSTICS got = ROW_COUNT;
  END IF;
  IF got = p_count OR near < reach THEN RETURN; END IF;
  RETURN QUERY SELECT y.* FROM unnest(p_names) n(name), LATERAL (
    SELECT v.ctid, v.seq, v.queued_at, v.earned FROM live v
    WHERE v.lane = p_lane AND v.name = n.name AND v.seq > far AND v.state = 0
      AND (v.expires_at IS NULL OR v.expires_at > now_)
    ORDER BY v.lane, v.name, v.seq LIMIT p_count - got) y
  ORDER BY y.seq LIMIT p_count - got;
END $$;

-- One lane whose site or class has limits, or a breaker. It never waits: a site or class that is
-- locked has its turn next time. Places and rates must not be forgotten by a crash of the server,
-- so these claims wait for the disk.
CREATE FUNCTION take_gated(p_tenure int, p_claim bigint, l lane, p_share int, p_names text[],
  p_older timestamptz, p_long bool)
RETURNS SETOF granted LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  now_ timestamptz := clock(); s site; c class; allow int; base timestamptz; wake timestamptz;
  was text; picked tid[]; first_ int; places int;
BEGIN
  IF p_names IS NULL THEN
    SELECT array_agg(x.ctid ORDER BY x.seq), count(*) FILTER (WHERE NOT x.earned)
    INTO picked, first_ FROM (
      SELECT v.ctid, v.seq, v.earned, v.queued_at FROM live v
      WHERE v.lane = l.lane AND v.seq > l.head AND v.state = 0
        AND (v.expires_at IS NULL OR v.expires_at > now_)
      ORDER BY v.lane, v.seq LIMIT p_share) x
    WHERE p_older IS NULL OR x.queued_at <= p_older;
  ELSE
    SELECT array_agg(x.c ORDER BY x.seq), count(*) FILTER (WHERE NOT x.earned)
    INTO picked, first_ FROM claimable(l.lane, l.head, p_names, p_share) x
    WHERE p_older IS NULL OR x.queued_at <= p_older;
  END IF;
  IF picked IS NULL THEN
    IF p_long AND p_older IS NULL THEN PERFORM leave_ring(ARRAY[l.lane]); END IF;
    RETURN;
  END IF;
  allow := cardinality(picked);
  IF l.target <> '' THEN
    SELECT * INTO s FROM site x WHERE x.target = l.target FOR UPDATE SKIP LOCKED;
    IF NOT FOUND AND EXISTS (SELECT FROM site x WHERE x.target = l.target) THEN RETURN; END IF;
  END IF;
  IF is_session(l.class) THEN
    c.name := session_class(session_of(l.class)); c.max_concurrent := 1;
    IF NOT pg_try_advisory_xact_lock(@lock_9@, hashtext(c.name)) THEN RETURN; END IF;
  ELSIF l.class <> '' THEN
    SELECT * INTO c FROM class x WHERE x.name = l.class AND x.max_concurrent > 0
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND AND EXISTS (
      SELECT FROM class x WHERE x.name = l.class AND x.max_concurrent > 0) THEN RETURN; END IF;
  END IF;
  IF s.target IS NOT NULL THEN
    was := s.state;
    IF s.state = 'open' AND now_ >= s.open_until THEN
      s.state := 'half-open'; s.successes := 0; s.round := s.round + 1;
    END IF;
    IF s.state = 'half-open' THEN
      SELECT count(*) INTO places FROM live v
      WHERE v.held = l.target AND v.state + 0 = 1 AND v.probe = s.round;
      allow := least(allow, (s.breaker ->> 'probes')::int - places);
    ELSIF s.state IN ('open', 'forced-open') THEN
      allow := 0;
      wake := CASE s.state WHEN 'open' THEN s.open_until END;
    END IF;
    IF s.max_concurrent > 0 AND allow > 0 THEN
      SELECT count(*) INTO places FROM live v WHERE v.held = l.target AND v.state + 0 = 1;
      allow := least(allow, s.max_concurrent - places);
    END IF;
  END IF;
  IF c.name IS NOT NULL AND allow > 0 THEN
    SELECT count(*) INTO places FROM live v WHERE v.held_class = c.name AND v.state + 0 = 1;
    allow := least(allow, c.max_concurrent - places);
    -- After the count: who frees the place and wants a login does both in one transaction.
    IF allow > 0 AND is_session(l.class) AND NOT is_login(l.class)
      AND is_logging_in(session_of(l.class)) THEN allow := 0; END IF;
  END IF;
  IF s.cost IS NOT NULL AND allow > 0 THEN
    base := greatest(coalesce(s.tat, now_), now_);
    allow := least(allow, floor(
      extract(epoch FROM now_ + s.burst * s.cost - base) / extract(epoch FROM s.cost) + 1e-9)::int);
    IF allow <= 0 THEN wake := base + s.cost - s.burst * s.cost; END IF;
  END IF;
  IF allow <= 0 THEN
    UPDATE lane SET state = 'p', wake_at = wake WHERE lane = l.lane;
    IF s.state IS DISTINCT FROM was THEN
      UPDATE site x SET state = s.state, successes = 0, round = s.round WHERE x.target = l.target;
    END IF;
    RETURN;
  END IF;
  IF s.target IS NOT NULL THEN
    s := budget_at(s, now_);
    IF allow < cardinality(picked) THEN
      SELECT count(*) FILTER (WHERE NOT v.earned) INTO first_
      FROM live v WHERE v.ctid = ANY (picked[1:allow]);
    END IF;
    UPDATE site x SET state = s.state, successes = s.successes, round = s.round,
      tat = CASE WHEN s.cost IS NULL THEN x.tat ELSE base + allow * s.cost END,
      units = least(greatest(s.full_units, s.units), s.units + first_ * coalesce(s.share, 0)),
      earned_at = s.earned_at
    WHERE x.target = l.target
      AND (s.limited OR s.state <> 'closed' OR s.units < s.full_units);
  END IF;
  RETURN QUERY
  WITH taken AS (
    UPDATE live v SET state = 1, tenure = p_tenure, claim = p_claim, attempt = v.attempt + 1,
      held = s.target, held_class = c.name, earned = v.earned OR s.target IS NOT NULL,
      probe = CASE WHEN s.state = 'half-open' THEN s.round ELSE 0 END
    WHERE v.ctid = ANY (picked[1:allow]) RETURNING v.*)
  SELECT t.id, t.claim, t.attempt, t.crashes, t.interruptions,
    policy_of(l.class, t.opts, l.target), t.probe <> 0,
    CASE WHEN t.expires_at IS NULL THEN 0 ELSE greatest(1, ns(t.expires_at - now_)) END,
    t.name, t.args, t.priority, l.target, t.key, (t.opts).timeout_ns, (t.opts).max_retries,
    (t.opts).delay_ns, (t.opts).expires_ns, (t.opts).cache_ns, (t.opts).debounce_ns,
    (t.opts).fallback, (t.opts).fallback_on, (t.opts).policy, (t.opts).on_open, (t.opts).watch,
    session_of(l.class)
  FROM taken t ORDER BY t.seq;
  IF s.limited OR s.state = 'half-open' OR c.name IS NOT NULL THEN
    PERFORM set_config('synchronous_commit', current_setting('musterd.synchronous_commit'), true);
  END IF;
END $$;

-- Lanes without a queued task leave a long ring; a submit or a retry brings them back.
CREATE FUNCTION leave_ring(p_lanes int[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE lane x SET state = 'e' WHERE x.lane = ANY (p_lanes) AND x.state = 'r' AND (
    SELECT true FROM live v WHERE v.lane = x.lane AND v.seq > x.head AND v.state = 0 LIMIT 1) IS NULL;
END $$;

-- The same for a node that lacks some of the tasks: from lanes without gates, one after the other.
CREATE FUNCTION take_named(p_tenure int, p_claim bigint, p_place regclass, p_ring int[],
  p_heads bigint[], p_share int, p_wanted int, p_names text[], p_older timestamptz)
RETURNS SETOF granted LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE now_ timestamptz := clock(); tops bigint[]; taken int[]; idle int[]; reached int;
BEGIN
  RETURN QUERY
  WITH picked AS MATERIALIZED (
    SELECT u.o, p.c FROM unnest(p_ring, p_heads) WITH ORDINALITY u(l, h, o),
      LATERAL claimable(u.l, u.h, p_names, p_share) p
    WHERE p_older IS NULL OR p.queued_at <= p_older LIMIT p_wanted),
  taken AS (
    UPDATE live v SET state = 1, tenure = p_tenure, claim = p_claim, attempt = v.attempt + 1,
      earned = true
    FROM picked WHERE v.ctid = picked.c RETURNING v.*, picked.o),
  stands AS MATERIALIZED (
    SELECT setval(p_place, p_ring[max(t.o)]) FROM taken t HAVING count(*) > 0)
  SELECT t.id, t.claim, t.attempt, t.crashes, t.interruptions, y.class, false,
    CASE WHEN t.expires_at IS NULL THEN 0 ELSE greatest(1, ns(t.expires_at - now_)) END,
    t.name, t.args, t.priority, y.target, t.key, (t.opts).timeout_ns,
    (t.opts).max_retries, (t.opts).delay_ns, (t.opts).expires_ns, (t.opts).cache_ns,
    (t.opts).debounce_ns, (t.opts).fallback, (t.opts).fallback_on, (t.opts).policy,
    (t.opts).on_open, (t.opts).watch, NULL
  FROM taken t JOIN lane y ON y.lane = t.lane LEFT JOIN stands ON true ORDER BY t.o, t.seq;
  GET DIAGNOSTICS reached = ROW_COUNT;
  IF p_older IS NOT NULL THEN RETURN; END IF;
  IF reached < p_wanted AND cardinality(p_ring) >= 64 THEN PERFORM leave_ring(p_ring); END IF;
  -- No head passes a task that somebody else may have.
  UPDATE lane x SET head = g.first - 1 FROM (
    SELECT y.lane, (SELECT min(v.seq) FROM live v
      WHERE v.lane = y.lane AND v.seq > y.head AND v.state = 0) AS first
    FROM lane y WHERE y.lane = ANY (p_ring) AND reached > 0) g
  WHERE x.lane = g.lane AND g.first - 1 > x.head + 8192 * cardinality(p_ring);
END $$;

-- Tasks of one level, lane after lane from where its ring stands, until there are enough or no
-- lane has one. A sequence says where the ring stands: a turn changes no row.
CREATE FUNCTION take(p_tenure int, p_claim bigint, p_pool int, p_level int, p_wanted int,
  p_names text[], p_older timestamptz)
RETURNS SETOF granted LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  place regclass := format('cursor_%s_%s', p_pool, p_level)::regclass;
  wanted int := p_wanted; before int; lanes int; most int; share int; cap int; got int; cur int;
  low int; high int; ring int[]; heads bigint[]; gates bool[]; l lane; now_ timestamptz;
BEGIN
  WHILE wanted > 0 LOOP
    before := wanted;
    SELECT count(*) INTO lanes FROM (
      SELECT FROM lane x WHERE x.pool = p_pool AND x.level = p_level AND x.state = 'r'
      LIMIT wanted) y;
    EXIT WHEN lanes = 0;
    share := greatest(1, wanted / least(lanes, most));  -- `most` lanes have something: none at first
    cap := greatest(wanted, 64);
    cur := coalesce(pg_sequence_last_value(place), 0);
    FOR half IN 1 .. 2 LOOP
      low := CASE half WHEN 1 THEN cur ELSE 0 END;
      high := CASE half WHEN 1 THEN 2147483647 ELSE cur END;
      LOOP
        SELECT array_agg(x.lane ORDER BY x.lane), array_agg(x.head ORDER BY x.lane),
          array_agg(x.gated ORDER BY x.lane) INTO ring, heads, gates
        FROM (
          SELECT y.lane, y.head,
            (y.target <> '' AND (SELECT true FROM site s WHERE s.target = y.target LIMIT 1))
            OR is_session(y.class) OR (y.class <> '' AND (SELECT true FROM class c
              WHERE c.name = y.class AND c.max_concurrent > 0 LIMIT 1)) AS gated
          FROM lane y WHERE y.pool = p_pool AND y.level = p_level AND y.state = 'r'
            AND y.lane > low AND y.lane <= high
          ORDER BY y.pool, y.level, y.lane LIMIT cap) x;
        EXIT WHEN ring IS NULL;
        low := ring[cardinality(ring)];
        IF true = ANY (gates) THEN
          FOR i IN 1 .. cardinality(ring) LOOP
            SELECT * INTO l FROM lane x WHERE x.lane = ring[i];
            RETURN QUERY SELECT * FROM take_gated(
              p_tenure, p_claim, l, least(share, wanted), p_names, p_older, cardinality(ring) >= 64);
            GET DIAGNOSTICS got = ROW_COUNT;
            IF got > 0 THEN PERFORM setval(place, ring[i]); END IF;
            wanted := wanted - got;
            EXIT WHEN wanted <= 0;
          END LOOP;
        ELSIF p_names IS NOT NULL THEN
          RETURN QUERY SELECT * FROM take_named(
            p_tenure, p_claim, place, ring, heads, share, wanted, p_names, p_older);
          GET DIAGNOSTICS got = ROW_COUNT;
          wanted := wanted - got;
        ELSE
          now_ := clock();
          RETURN QUERY
          WITH picked AS MATERIALIZED (
            SELECT u.o, p.c FROM unnest(ring, heads) WITH ORDINALITY u(l, h, o), LATERAL (
              SELECT v.ctid AS c, v.queued_at FROM live v
              WHERE v.lane = u.l AND v.seq > u.h AND v.state = 0
                AND (v.expires_at IS NULL OR v.expires_at > now_)
              ORDER BY v.lane, v.seq LIMIT share) p
            WHERE p_older IS NULL OR p.queued_at <= p_older LIMIT wanted),
          taken AS (
            UPDATE live v SET state = 1, tenure = p_tenure, claim = p_claim,
              attempt = v.attempt + 1, earned = true
            FROM picked WHERE v.ctid = picked.c RETURNING v.*, picked.o),
          stands AS MATERIALIZED (
            SELECT setval(place, ring[max(t.o)]), max(t.o) AS o, count(*) AS n FROM taken t
            HAVING count(*) > 0),
          -- Heads move on after some thousand tasks: each move leaves a dead row, which all who read
          -- the lane have to pass while a snapshot is held. Lanes without a task leave a long ring.
          moved AS (
            UPDATE lane x SET head = coalesce(g.top, x.head),
              state = CASE WHEN g.k = 0 THEN 'e' ELSE 'r' END::"char"
            FROM (
              SELECT u.l, u.h, count(t.id) AS k, max(t.seq) AS top
              FROM unnest(ring, heads) WITH ORDINALITY u(l, h, o)
              LEFT JOIN taken t ON t.o = u.o
              WHERE u.o <= coalesce((
                SELECT CASE WHEN s.n < wanted THEN cardinality(ring) ELSE s.o END FROM stands s),
                cardinality(ring))
              GROUP BY 1, 2) g
            WHERE x.lane = g.l AND p_older IS NULL
              AND ((g.k = 0 AND cardinality(ring) >= 64) OR g.top > g.h + 8192 * cardinality(ring)))
          SELECT t.id, t.claim, t.attempt, t.crashes, t.interruptions, y.class, false,
            CASE WHEN t.expires_at IS NULL THEN 0 ELSE greatest(1, ns(t.expires_at - now_)) END,
            t.name, t.args, t.priority, y.target, t.key, (t.opts).timeout_ns,
            (t.opts).max_retries, (t.opts).delay_ns, (t.opts).expires_ns, (t.opts).cache_ns,
            (t.opts).debounce_ns, (t.opts).fallback, (t.opts).fallback_on, (t.opts).policy,
            (t.opts).on_open, (t.opts).watch, NULL
          FROM taken t JOIN lane y ON y.lane = t.lane ORDER BY t.o, t.seq;
          GET DIAGNOSTICS got = ROW_COUNT;
          wanted := wanted - got;
        END IF;
        EXIT WHEN wanted <= 0 OR cardinality(ring) < cap;
      END LOOP;
      EXIT WHEN wanted <= 0;
    END LOOP;
    EXIT WHEN wanted = before;
    most := (before - wanted + share - 1) / share;
  END LOOP;
END $$;

-- A claim that a crash of the server forgets is claimed again, so it does not wait for the disk
-- (unless limits are concerned: take_gated).
CREATE FUNCTION claim_1(p_tenure int, p_pools text[], p_counts int[], p_names text[])
RETURNS SETOF granted LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  n node; w record; number bigint; wanted int; aged int; got int; names text[]; turn bigint;
  life text := epoch();
BEGIN
  PERFORM pg_advisory_xact_lock_shared(@lock_3@, p_tenure);
  SELECT * INTO n FROM node x WHERE x.tenure = p_tenure AND p_tenure <> 0;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'tenure % is over', p_tenure USING ERRCODE = 'MU001';
  END IF;
  -- Nobody, before all have registered what they run; least of all who has not done so itself.
  IF n.draining OR life IS NULL OR n.epoch <> life OR EXISTS (
    SELECT FROM node x WHERE x.tenure <> 0 AND x.epoch <> life AND x.beat + x.lease > clock())
  THEN RETURN; END IF;
  PERFORM set_config('musterd.synchronous_commit', current_setting('synchronous_commit'), true);
  PERFORM set_config('synchronous_commit', 'off', true);
  PERFORM pg_advisory_xact_lock(@lock_1@, x.pool) FROM (
    SELECT p.pool FROM pool p WHERE p.name = ANY (p_pools) ORDER BY p.pool) x;
  number := ((random() * 2147483647)::bigint << 31) | (random() * 2147483647)::bigint | 1;
  FOR w IN
    SELECT p.*, u.wanted FROM unnest(p_pools, p_counts) WITH ORDINALITY u(name, wanted, o)
    JOIN pool p ON p.name = u.name ORDER BY u.o
  LOOP
    wanted := w.wanted;
    UPDATE lane x SET state = 'r', wake_at = NULL
    WHERE x.pool = w.pool AND x.state = 'p' AND x.wake_at <= clock();
    names := NULL;
    IF EXISTS (SELECT FROM known_task t WHERE t.pool = w.pool AND t.name <> ALL (p_names)) THEN
      SELECT coalesce(array_agg(n), '{}') INTO names FROM unnest(p_names) n
      WHERE starts_with(n, w.name || '.');
    END IF;
    turn := coalesce(pg_sequence_last_value(format('turns_%s', w.pool)::regclass), 0);
    aged := (turn % 16 + wanted) / 16;
    FOR level IN REVERSE 3 .. 1 LOOP
      EXIT WHEN aged <= 0;
      CONTINUE WHEN level <> ALL (w.aged);
      RETURN QUERY SELECT * FROM take(
        p_tenure, number, w.pool, level, aged, names, clock() - w.aging);
      GET DIAGNOSTICS got = ROW_COUNT;
      aged := aged - got; wanted := wanted - got;
    END LOOP;
    FOR level IN 0 .. 3 LOOP
      EXIT WHEN wanted <= 0;
      RETURN QUERY SELECT * FROM take(p_tenure, number, w.pool, level, wanted, names, NULL);
      GET DIAGNOSTICS got = ROW_COUNT;
      wanted := wanted - got;
    END LOOP;
    IF wanted < w.wanted THEN
      PERFORM setval(format('turns_%s', w.pool)::regclass, (turn + w.wanted - wanted) % 16 + 16);
    END IF;
  END LOOP;
END $$;

-- Lock claimed tasks in the order of their ids: an UPDATE of several may take another one.
CREATE FUNCTION lock_claims(p_tenure int, p_ids text[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM FROM live x WHERE x.id = ANY (p_ids) AND x.state + 0 = 1 AND x.tenure = p_tenure
  ORDER BY x.id FOR UPDATE;
END $$;

CREATE FUNCTION begun_1(p_tenure int, p_ids text[], p_claims bigint[]) RETURNS void
LANGUAGE sql AS $$
  SELECT lock_claims(p_tenure, p_ids);
  UPDATE live v SET begun = true FROM unnest(p_ids, p_claims) AS u(id, claim)
  WHERE v.id = u.id AND v.state + 0 = 1 AND v.tenure = p_tenure AND v.claim = u.claim $$;

-- Those that joined a task show its progress (tasks_seen). Returns those for which it is too early.
CREATE FUNCTION progress_1(p_tenure int, p_ids text[], p_fractions real[], p_texts text[])
RETURNS SETOF text LANGUAGE sql AS $$
  SELECT lock_claims(p_tenure, p_ids);
  WITH noted AS (
    UPDATE live v SET fraction = u.fraction, progress = u.text, progress_at = clock()
    FROM unnest(p_ids, p_fractions, p_texts) AS u(id, fraction, text)
    WHERE v.id = u.id AND v.state + 0 = 1 AND v.tenure = p_tenure
      AND (v.progress_at IS NULL OR v.progress_at <= clock() - interval '1s')
    RETURNING v.id)
  SELECT v.id FROM live v WHERE v.id = ANY (p_ids) AND v.state + 0 = 1 AND v.tenure = p_tenure
    AND v.id NOT IN (SELECT n.id FROM noted n) $$;
