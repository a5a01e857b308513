-- Sites: their limits as the policy has them, and what attempts say about them.

CREATE FUNCTION default_breaker() RETURNS jsonb LANGUAGE sql STABLE AS
  'SELECT p.breaker FROM policy p ORDER BY p.version DESC LIMIT 1';

-- The site as the policy has it: a row as new.
CREATE FUNCTION site_as_new(p_target text, p_class text) RETURNS site LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE t target; s site; b jsonb;
BEGIN
  SELECT * INTO t FROM target x WHERE x.target IN (p_target, '*') ORDER BY x.target = '*' LIMIT 1;
  b := t.breaker;
  IF b IS NULL THEN
    SELECT c.breaker INTO b FROM class c WHERE c.name = coalesce(nullif(t.class, ''), p_class);
  END IF;
  b := coalesce(b, default_breaker());
  s.target := p_target; s.class := p_class; s.max_concurrent := t.max_concurrent;
  s.cost := CASE WHEN t.rate > 0 THEN make_interval(secs => 1 / t.rate) END;
  s.burst := t.burst; s.breaker := b;
  s.limited := t.max_concurrent > 0 OR t.rate > 0 OR (b ->> 'window')::int > 0;
  s.state := CASE WHEN (b ->> 'enabled')::bool THEN 'closed' ELSE 'disabled' END;
  s.failures := 0; s.successes := 0; s.reopenings := 0; s.round := 0; s.calls := '';
  s.share := round(t.share * 1000000);
  s.full_units := greatest(round(t.reserve * 1000000), 1000000);
  s.every_ns := CASE WHEN t.share > 0 THEN t.every_ns ELSE 0 END;
  s.units := round(t.reserve * 1000000); s.earned_at := clock();
  RETURN s;
END $$;

-- Lock the site's row, which is made if there is none.
CREATE FUNCTION site_locked(p_target text, p_class text) RETURNS site LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s site;
BEGIN
  LOOP
    SELECT * INTO s FROM site x WHERE x.target = p_target FOR UPDATE;
    IF FOUND THEN RETURN s; END IF;
    INSERT INTO site SELECT (site_as_new(p_target, p_class)).* ON CONFLICT DO NOTHING;
  END LOOP;
END $$;

CREATE FUNCTION is_as_new(s site) RETURNS bool LANGUAGE sql IMMUTABLE AS $$
  SELECT s.state = CASE WHEN (s.breaker ->> 'enabled')::bool THEN 'closed' ELSE 'disabled' END
    AND s.failures = 0 AND s.reopenings = 0 AND s.calls = '' $$;

CREATE FUNCTION is_shut(s site, now_ timestamptz) RETURNS bool LANGUAGE sql IMMUTABLE AS
  $$ SELECT s.state = 'forced-open' OR (s.state = 'open' AND now_ < s.open_until) $$;

CREATE FUNCTION opened(s site, p_retry_after bigint) RETURNS site LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE b jsonb := s.breaker; pause float8; most float8 := (b ->> 'open_max_ns')::float8;
BEGIN
  s.reopenings := s.reopenings + 1;
  pause := least(most,
    (b ->> 'open_ns')::float8 * (b ->> 'open_factor')::float8 ^ least(s.reopenings - 1, 64));
  IF s.reopenings > 1 THEN
    pause := least(most, pause * (1 + (b ->> 'open_jitter')::float8 * (2 * random() - 1)));
  END IF;
  s.state := 'open';
  s.open_until := clock() + span(greatest(pause::bigint, p_retry_after));
  s.calls := '';
  RETURN s;
END $$;

-- Fold one attempt into the site's breaker, as ipc/resilience/breaker.py does.
CREATE FUNCTION site_heard(p_target text, p_class text, p_ok bool, p_probe int, p_run_ns bigint,
  p_retry_after bigint) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s site; b jsonb; slow bool; n int; failed_ int; slow_ int;
BEGIN
  IF p_ok THEN
    SELECT * INTO s FROM site x WHERE x.target = p_target;
    IF NOT FOUND OR s.state NOT IN ('closed', 'half-open') OR (
      s.state = 'closed' AND s.failures = 0 AND (s.breaker ->> 'window')::int = 0)
    THEN RETURN; END IF;
  END IF;
  s := site_locked(p_target, p_class);
  b := s.breaker;
  IF s.state = 'closed' THEN
    s.failures := CASE WHEN p_ok THEN 0 ELSE s.failures + 1 END;
    IF (b ->> 'failures')::int > 0 AND s.failures >= (b ->> 'failures')::int THEN
      s := opened(s, p_retry_after);
    ELSIF (b ->> 'window')::int > 0 THEN
      slow := (b ->> 'slow_ns')::bigint > 0 AND p_run_ns > (b ->> 'slow_ns')::bigint;
      s.calls := right(s.calls || CASE WHEN p_ok AND slow THEN 's' WHEN p_ok THEN '.'
        WHEN slow THEN 'b' ELSE 'f' END, (b ->> 'window')::int);
      n := length(s.calls);
      failed_ := length(translate(s.calls, '.s', '')); slow_ := length(translate(s.calls, '.f', ''));
      IF n >= (b ->> 'window_calls_min')::int AND (
        ((b ->> 'failure_rate')::float8 > 0 AND failed_ >= (b ->> 'failure_rate')::float8 * n)
        OR ((b ->> 'slow_rate')::float8 > 0 AND slow_ >= (b ->> 'slow_rate')::float8 * n))
      THEN
        s.failures := greatest(s.failures, failed_);
        s := opened(s, p_retry_after);
      END IF;
    END IF;
  ELSIF s.state = 'half-open' AND p_probe <> 0 AND p_probe = s.round THEN
    s.failures := CASE WHEN p_ok THEN 0 ELSE s.failures + 1 END;
    IF NOT p_ok THEN
      s := opened(s, p_retry_after);
    ELSE
      s.successes := s.successes + 1;
      IF s.successes >= (b ->> 'successes')::int THEN
        s.state := 'closed'; s.failures := 0; s.successes := 0; s.reopenings := 0;
        s.open_until := NULL; s.calls := '';
      END IF;
    END IF;
  ELSE
    RETURN;
  END IF;
  UPDATE site x SET state = s.state, failures = s.failures, successes = s.successes,
    reopenings = s.reopenings, open_until = s.open_until, calls = s.calls
  WHERE x.target = p_target;
END $$;

-- Pay for a retry, if the budget can.
CREATE FUNCTION site_pays(p_target text, p_class text) RETURNS bool LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s site;
BEGIN
  SELECT * INTO s FROM site_as_new(p_target, p_class) x
  WHERE NOT EXISTS (SELECT FROM site y WHERE y.target = p_target);
  IF FOUND AND s.share IS NULL THEN RETURN true; END IF;
  s := site_locked(p_target, p_class);
  IF s.share IS NULL THEN RETURN true; END IF;
  s := budget_at(s, clock());
  IF s.units >= 1000000 THEN
    UPDATE site x SET units = s.units - 1000000, earned_at = s.earned_at WHERE x.target = p_target;
    RETURN true;
  END IF;
  UPDATE site x SET units = s.units, earned_at = s.earned_at
  WHERE x.target = p_target AND x.earned_at <> s.earned_at;
  RETURN false;
END $$;

CREATE FUNCTION breaker_1(p_target text, p_command text) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s site := site_locked(p_target, '');
BEGIN
  IF p_command = 'open' THEN
    UPDATE site x SET state = 'forced-open' WHERE x.target = p_target;
  ELSIF p_command = 'disable' THEN
    UPDATE site x SET state = 'disabled' WHERE x.target = p_target;
  ELSIF p_command IN ('close', 'reset') THEN
    UPDATE site x SET failures = 0, successes = 0, reopenings = 0, open_until = NULL, calls = '',
      state = CASE WHEN p_command = 'close' OR (x.breaker ->> 'enabled')::bool THEN 'closed'
        ELSE 'disabled' END
    WHERE x.target = p_target;
  ELSE
    RAISE EXCEPTION 'a breaker has no command %', p_command USING ERRCODE = '22023';
  END IF;
END $$;

-- Sites that people want to see, at most 1,000: those with a breaker that is not closed first. No
-- more than 1,000 tasks that wait are counted of each.
CREATE FUNCTION sites_1() RETURNS TABLE (target text, breaker text, open_for bigint, failures int,
  inside bigint, reopenings int, waiting bigint) LANGUAGE sql STABLE AS $$
  SELECT s.target, s.state,
    CASE WHEN s.state = 'open' THEN greatest(0, ns(s.open_until - clock())) ELSE 0 END, s.failures,
    (SELECT count(*) FROM live v WHERE v.held = s.target AND v.state = 1), s.reopenings,
    (SELECT count(*) FROM (SELECT FROM lane l JOIN live v ON v.lane = l.lane AND v.state = 0
      WHERE l.target = s.target LIMIT 1000) w)
  FROM (SELECT * FROM site x WHERE x.max_concurrent > 0 OR x.cost IS NOT NULL OR NOT is_as_new(x)
    ORDER BY x.state = 'closed', x.target LIMIT 1000) s
  ORDER BY s.target $$;
