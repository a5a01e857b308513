-- The policy of all nodes: applied as a whole, versioned, and spread over tables that are read fast.

CREATE FUNCTION policy_1() RETURNS TABLE (version int, doc bytea, scheduled int)
LANGUAGE sql STABLE AS
  'SELECT p.version, p.doc, scheduled() FROM policy p ORDER BY p.version DESC LIMIT 1';

CREATE FUNCTION set_target(p_target text, t jsonb) RETURNS void LANGUAGE sql AS $$
  INSERT INTO target VALUES (p_target, t ->> 'policy', t ->> 'on_open', t ->> 'fallback_on',
    (t ->> 'max_concurrent')::int, (t ->> 'rate')::float8, (t ->> 'burst')::int,
    nullif(t -> 'breaker', 'null'), (t ->> 'retry_share')::float8,
    (t ->> 'retry_reserve')::float8, (t ->> 'retry_every_ns')::bigint) $$;

CREATE FUNCTION spread(doc jsonb) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE item record;
BEGIN
  DELETE FROM class; DELETE FROM target;
  INSERT INTO class SELECT c.key, (c.value ->> 'max_concurrent')::int, c.value ->> 'on_open',
    c.value ->> 'fallback_on', doc -> 'class_breakers' -> c.key
  FROM jsonb_each(doc -> 'classes') c;
  PERFORM set_target('*', doc -> 'target');
  PERFORM set_target(t.key, t.value) FROM jsonb_each(doc -> 'targets') t;
  DELETE FROM schedule s WHERE NOT s.added AND s.name NOT IN (
    SELECT x ->> 'name' FROM jsonb_array_elements(doc -> 'schedules') x);
  INSERT INTO schedule AS s (name, plan, notify)
  SELECT x ->> 'name', decode(x ->> 'plan', 'base64'), (x ->> 'notify')::bool
  FROM jsonb_array_elements(doc -> 'schedules') x
  ON CONFLICT (name) DO UPDATE SET notify = EXCLUDED.notify, plan = EXCLUDED.plan,
    added = false, section = '', turn = s.turn + (s.plan <> EXCLUDED.plan)::int,
    next_ns = CASE WHEN s.plan <> EXCLUDED.plan THEN 0 ELSE s.next_ns END;
END $$;

-- Sites take over another policy: what they have gone through stays.
CREATE FUNCTION follow_sites() RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s site; n site; fresh bool;
BEGIN
  FOR s IN SELECT * FROM site x ORDER BY x.target FOR UPDATE LOOP
    n := site_as_new(s.target, s.class);
    fresh := is_as_new(s) OR ((s.breaker ->> 'enabled') <> (n.breaker ->> 'enabled')
      AND s.state <> 'forced-open');
    UPDATE site x SET limited = n.limited, max_concurrent = n.max_concurrent, cost = n.cost,
      burst = n.burst, breaker = n.breaker, share = n.share, full_units = n.full_units,
      every_ns = n.every_ns,
      tat = CASE WHEN (s.cost, s.burst) IS DISTINCT FROM (n.cost, n.burst) THEN NULL ELSE s.tat END,
      units = CASE WHEN s.share IS NULL THEN n.units ELSE least(s.units, n.full_units) END,
      state = CASE WHEN fresh THEN n.state ELSE s.state END,
      failures = CASE WHEN fresh THEN 0 ELSE s.failures END,
      reopenings = CASE WHEN fresh THEN 0 ELSE s.reopenings END,
      calls = CASE WHEN fresh THEN '' ELSE right(s.calls, (n.breaker ->> 'window')::int) END
    WHERE x.target = s.target;
  END LOOP;
  PERFORM sites_for((SELECT array_agg(l.lane) FROM lane l));
END $$;

-- Apply a policy after version `p_former`. Claims under way count for the limits that are new.
CREATE FUNCTION apply_1(p_doc bytea, p_former int) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE doc jsonb := convert_from(p_doc, 'UTF8')::jsonb; now_at int;
BEGIN
  IF octet_length(p_doc) > 16777216 THEN
    RAISE EXCEPTION 'a policy has at most 16 MiB' USING ERRCODE = '22023';
  END IF;
  PERFORM pg_advisory_xact_lock(@lock_5@, 1);
  now_at := applied();
  IF now_at <> p_former THEN
    RAISE EXCEPTION 'version % is applied, not %', now_at, p_former USING ERRCODE = 'MU003';
  END IF;
  PERFORM lock_pools((SELECT array_agg(p.pool) FROM pool p));
  PERFORM spread(doc);
  INSERT INTO policy VALUES (p_former + 1, p_doc, clock(), (doc -> 'cache' ->> 'enabled')::bool,
    (doc -> 'cache' ->> 'debounce')::bool, (doc -> 'cache' ->> 'entries')::int, doc -> 'breaker',
    jsonb_path_exists(doc, '$.** ? (@.window > 0)'));
  PERFORM FROM live v WHERE v.state = 1 ORDER BY v.id FOR UPDATE;
  PERFORM forget_results();
  PERFORM follow_sites();
  UPDATE live v SET held = (SELECT s.target FROM site s WHERE s.target = l.target),
    held_class = place_of(l.class)
  FROM lane l WHERE l.lane = v.lane AND v.state = 1;
  UPDATE lane l SET state = 'r', wake_at = NULL WHERE l.state = 'p';
  PERFORM notify_pools((SELECT array_agg(p.pool) FROM pool p));
  PERFORM pg_notify(current_schema() || '_node_' || n.tenure, '') FROM node n WHERE n.tenure <> 0;
  RETURN p_former + 1;
END $$;
