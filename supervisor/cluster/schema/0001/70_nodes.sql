-- Nodes: tenures, heartbeats, the end of a node.

-- Let nodes know that there is something for them: orders, or a lock that is free.
CREATE FUNCTION notify_nodes(p_tenures int[]) RETURNS void LANGUAGE sql AS $$
  SELECT pg_notify(current_schema() || '_node_' || t, '') FROM unnest(p_tenures) t $$;

-- Take claims of a tenure back, all but those that are known. `p_lost`: what had begun has crashed;
-- else nobody has touched it. The caller has locked the tenure: a claim under way was waited for.
CREATE FUNCTION take_back(p_tenure int, p_ids text[], p_claims bigint[], p_lost bool)
RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE ids text[]; v live;
BEGIN
  SELECT array_agg(x.id) INTO ids FROM live x WHERE x.state = 1 AND x.tenure = p_tenure
    AND NOT EXISTS (SELECT FROM unnest(p_ids, p_claims) u(id, claim)
      WHERE u.id = x.id AND u.claim = x.claim);
  IF ids IS NULL THEN RETURN; END IF;
  PERFORM lock_keys(ids);
  FOR v IN SELECT * FROM live x WHERE x.id = ANY (ids) AND x.state + 0 = 1 AND x.tenure = p_tenure
    ORDER BY x.id FOR UPDATE
  LOOP
    IF v.begun AND p_lost THEN
      v := noted(v, node_of(p_tenure), failure('crash', '', 'its node was lost'),
        'crash: its node was lost');
      RETURN QUERY SELECT * FROM crashed(v);
    ELSE
      v.attempt := v.attempt - 1;
      RETURN QUERY SELECT * FROM give_back(v);
    END IF;
  END LOOP;
END $$;

-- End a tenure: its claims go back, its locks are free. The caller has locked the tenure.
CREATE FUNCTION end_tenure(p_tenure int) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE nodes int[];
BEGIN
  WITH gone AS (DELETE FROM lock l WHERE l.tenure = p_tenure RETURNING l.name)
  SELECT array_agg(DISTINCT l.tenure) INTO nodes FROM gone g JOIN lock l ON l.name = g.name
  WHERE l.tenure <> p_tenure;
  PERFORM notify_nodes(nodes);
  RETURN QUERY SELECT * FROM take_back(p_tenure, '{}', '{}', true);
  UPDATE node n SET tenure = 0 WHERE n.tenure = p_tenure;
END $$;

CREATE FUNCTION is_alive(n node) RETURNS bool LANGUAGE sql STABLE AS
  'SELECT n.tenure <> 0 AND clock() < n.beat + n.lease';

CREATE FUNCTION applied() RETURNS int LANGUAGE sql STABLE AS
  'SELECT coalesce(max(p.version), -1) FROM policy p';

-- A name is its node's until that has left or was reaped: a node whose lease is over may be back.
CREATE FUNCTION refuse_name(p_identity text, p_name text) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE other node;
BEGIN
  SELECT * INTO other FROM node n
  WHERE n.name = p_name AND n.identity <> p_identity AND n.tenure <> 0
  ORDER BY n.beat DESC LIMIT 1;
  IF FOUND THEN
    RAISE EXCEPTION 'the name ''%'' is taken by another node', p_name
    USING ERRCODE = 'MU002', DETAIL = ns(clock() - other.beat);
  END IF;
END $$;

-- Note the pools and tasks of a node. The caller has the lock of those who join.
CREATE FUNCTION declare(p_identity text, p_pools text[], p_sizes int[], p_agings bigint[],
  p_crashes int[], p_caches bigint[], p_debounces bigint[], p_tasks text[], p_fallback_ons text[],
  p_task_caches bigint[], p_task_debounces bigint[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE p record; number int;
BEGIN
  FOR p IN SELECT * FROM unnest(p_pools, p_sizes, p_agings, p_crashes, p_caches, p_debounces)
    AS u(name, size, aging, crashes, cache, debounce) ORDER BY 1
  LOOP
    UPDATE pool x SET queue_size = p.size, aging = span(p.aging), max_crashes = p.crashes,
      cache_ns = p.cache, debounce_ns = p.debounce
    WHERE x.name = p.name RETURNING x.pool INTO number;
    IF NOT FOUND THEN
      INSERT INTO pool (name, queue_size, aging, max_crashes, cache_ns, debounce_ns)
      VALUES (p.name, p.size, span(p.aging), p.crashes, p.cache, p.debounce)
      RETURNING pool.pool INTO number;
      FOR level IN 0 .. 3 LOOP
        EXECUTE format('CREATE SEQUENCE cursor_%s_%s AS int', number, level);
      END LOOP;
      EXECUTE format('CREATE SEQUENCE turns_%s', number);
    END IF;
  END LOOP;
  DELETE FROM node_task x WHERE x.identity = p_identity;
  INSERT INTO node_task
  SELECT DISTINCT ON (u.name) p_identity, u.name, y.pool, u.fallback_on, u.cache, u.debounce
  FROM unnest(p_tasks, p_fallback_ons, p_task_caches, p_task_debounces)
    AS u(name, fallback_on, cache, debounce) JOIN pool y ON y.name = split_part(u.name, '.', 1);
  INSERT INTO known_task SELECT t.name, t.pool FROM node_task t WHERE t.identity = p_identity
  ORDER BY t.name ON CONFLICT DO NOTHING;
END $$;

-- Give back what a node had claimed whose daemon begins anew. Its tenure lasts, and so does its name.
CREATE FUNCTION give_back_1(p_identity text) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE t int;
BEGIN
  SELECT n.tenure INTO t FROM node n WHERE n.identity = p_identity AND n.tenure <> 0;
  IF NOT FOUND THEN RETURN; END IF;
  PERFORM pg_advisory_xact_lock(@lock_3@, t);  -- a claim that is under way is waited for
  RETURN QUERY SELECT * FROM take_back(t, '{}', '{}', true);
END $$;

-- Begin a tenure. `told` are the claims of this identity's last one, which go back.
CREATE FUNCTION join_1(p_identity text, p_name text, p_lease bigint, p_software text, p_card bytea,
  p_pools text[], p_sizes int[], p_agings bigint[], p_crashes int[], p_caches bigint[],
  p_debounces bigint[], p_tasks text[], p_fallback_ons text[], p_task_caches bigint[],
  p_task_debounces bigint[])
RETURNS TABLE (tenure int, epoch text, policy int, id text, waiter bigint, state smallint, lane int,
  held text, held_class text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE former node; t int; back told[];
BEGIN
  PERFORM begin_life();
  PERFORM pg_advisory_xact_lock(@lock_5@, 0);  -- one node joins at a time
  PERFORM pg_advisory_xact_lock(@lock_6@, 0);
  PERFORM add_partitions_soon();
  PERFORM refuse_name(p_identity, p_name);
  SELECT * INTO former FROM node n WHERE n.identity = p_identity;
  IF former.tenure <> 0 AND former.name <> p_name THEN  -- a copy of another machine, maybe
    RAISE EXCEPTION 'the identity in node.id is taken by node ''%''', former.name
    USING ERRCODE = 'MU002', DETAIL = ns(clock() - former.beat);
  END IF;
  IF former.tenure <> 0 THEN
    PERFORM pg_advisory_xact_lock(@lock_3@, former.tenure);
    SELECT array_agg(x) INTO back FROM end_tenure(former.tenure) x;
  END IF;
  t := nextval('tenure_seq');
  INSERT INTO node VALUES (p_identity, p_name, t, clock(), span(p_lease), epoch(), false,
    p_software, p_card)
  ON CONFLICT (identity) DO UPDATE SET name = EXCLUDED.name, tenure = EXCLUDED.tenure,
    beat = EXCLUDED.beat, lease = EXCLUDED.lease, epoch = EXCLUDED.epoch,
    software = EXCLUDED.software, card = EXCLUDED.card, lost = false;
  PERFORM declare(p_identity, p_pools, p_sizes, p_agings, p_crashes, p_caches, p_debounces,
    p_tasks, p_fallback_ons, p_task_caches, p_task_debounces);
  RETURN QUERY SELECT t, epoch(), applied(), b.* FROM (SELECT) x LEFT JOIN unnest(back) b ON true;
END $$;

CREATE FUNCTION tenured(p_tenure int) RETURNS node LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node;
BEGIN
  SELECT * INTO n FROM node x WHERE x.tenure = p_tenure AND p_tenure <> 0;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'tenure % is over', p_tenure USING ERRCODE = 'MU001';
  END IF;
  RETURN n;
END $$;

-- Say anew what a node is and has, within its tenure. It is no heartbeat.
CREATE FUNCTION redeclare_1(p_tenure int, p_name text, p_lease bigint, p_software text,
  p_card bytea, p_pools text[], p_sizes int[], p_agings bigint[], p_crashes int[],
  p_caches bigint[], p_debounces bigint[], p_tasks text[], p_fallback_ons text[],
  p_task_caches bigint[], p_task_debounces bigint[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node;
BEGIN
  PERFORM pg_advisory_xact_lock(@lock_5@, 0);
  PERFORM pg_advisory_xact_lock_shared(@lock_3@, p_tenure);
  n := tenured(p_tenure);
  PERFORM refuse_name(n.identity, p_name);
  UPDATE node x SET name = p_name, lease = span(p_lease), software = p_software, card = p_card
  WHERE x.tenure = p_tenure;
  PERFORM declare(n.identity, p_pools, p_sizes, p_agings, p_crashes, p_caches, p_debounces,
    p_tasks, p_fallback_ons, p_task_caches, p_task_debounces);
END $$;

CREATE FUNCTION beat_1(p_tenure int) RETURNS TABLE (epoch text, policy int, draining bool,
  cancel text[], scheduled int, sessions text[], failures int[], lefts bigint[], problems text[],
  nodes text[]) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node := tenured(p_tenure);
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  PERFORM begin_life();
  UPDATE node x SET beat = clock() WHERE x.tenure = p_tenure;
  IF NOT FOUND THEN
    RAISE EXCEPTION 'tenure % is over', p_tenure USING ERRCODE = 'MU001';
  END IF;
  RETURN QUERY SELECT epoch(), applied(), n.draining, (
    SELECT array_agg(v.id ORDER BY v.id) FROM live v
    WHERE v.state = 1 AND v.tenure = p_tenure AND v.cancel), scheduled(), l.*
  FROM (SELECT array_agg(x.session), array_agg(x.failures), array_agg(x.left_ns),
    array_agg(x.problem), array_agg(x.node) FROM logins_1(NULL) x) l;
END $$;

-- Register running claims after a restart of the server; return the ids that are lost (state -1).
-- A claim that the server forgot is made again, whatever the limits: the task runs. All other claims
-- of the tenure go back.
CREATE FUNCTION rejoin_1(p_tenure int, p_ids text[], p_claims bigint[]) RETURNS SETOF told
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node;
BEGIN
  PERFORM begin_life();
  PERFORM pg_advisory_xact_lock(@lock_3@, p_tenure);  -- a claim that is under way is waited for
  n := tenured(p_tenure);
  PERFORM lock_pools(pools_of(p_ids));
  RETURN QUERY SELECT * FROM take_back(p_tenure, p_ids, p_claims, true);
  UPDATE live v SET state = 1, tenure = p_tenure, claim = u.claim, attempt = v.attempt + 1,
    begun = true, earned = true, held = s.target, held_class = place_of(l.class)
  FROM unnest(p_ids, p_claims) u(id, claim) JOIN live w ON w.id = u.id AND w.state + 0 = 0
  JOIN lane l ON l.lane = w.lane LEFT JOIN site s ON s.target = l.target
  WHERE v.id = u.id;
  UPDATE node x SET beat = clock(), epoch = epoch() WHERE x.tenure = p_tenure;
  RETURN QUERY SELECT u.id, 0::bigint, -1::smallint, NULL::int, NULL::text, NULL::text
  FROM unnest(p_ids, p_claims) WITH ORDINALITY u(id, claim, o)
  WHERE NOT EXISTS (SELECT FROM live v WHERE v.id = u.id AND v.state + 0 = 1 AND v.tenure = p_tenure
    AND v.claim = u.claim) ORDER BY u.o;
END $$;

-- Give back the claims of a node that it does not know of: their grant never reached it.
CREATE FUNCTION release_1(p_tenure int, p_ids text[], p_claims bigint[]) RETURNS SETOF told
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node;
BEGIN
  PERFORM pg_advisory_xact_lock(@lock_3@, p_tenure);  -- a claim that is under way is waited for
  n := tenured(p_tenure);
  RETURN QUERY SELECT * FROM take_back(p_tenure, p_ids, p_claims, false);
END $$;

CREATE FUNCTION leave_1(p_tenure int) RETURNS SETOF told LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  PERFORM pg_advisory_xact_lock(@lock_3@, p_tenure);
  IF p_tenure <> 0 THEN RETURN QUERY SELECT * FROM end_tenure(p_tenure); END IF;
END $$;

-- One node whose lease is over, never by a connection younger than that lease: after an outage of
-- the server nobody could beat.
CREATE FUNCTION reap_1() RETURNS TABLE (name text, tenure int, id text, waiter bigint,
  state smallint, lane int, held text, held_class text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node; since timestamptz; back told[];
BEGIN
  -- When this session was here first. Its start in pg_stat_activity is hidden from an owner of the
  -- schema who is no superuser: these are sessions of other users.
  since := to_timestamp(nullif(current_setting('musterd.since', true), '')::float8);
  IF since IS NULL THEN
    since := clock_timestamp();
    PERFORM set_config('musterd.since', extract(epoch FROM since)::text, false);
  END IF;
  SELECT * INTO n FROM node x WHERE x.tenure <> 0 AND NOT is_alive(x) AND since < clock() - x.lease
  ORDER BY x.tenure LIMIT 1;
  IF NOT FOUND OR NOT pg_try_advisory_xact_lock(@lock_3@, n.tenure) THEN RETURN; END IF;
  PERFORM FROM node x WHERE x.tenure = n.tenure AND NOT is_alive(x) FOR UPDATE;
  IF NOT FOUND THEN RETURN; END IF;  -- it was heard of meanwhile
  SELECT array_agg(x) INTO back FROM end_tenure(n.tenure) x;
  UPDATE node x SET lost = true WHERE x.identity = n.identity;
  RETURN QUERY SELECT n.name, n.tenure, b.* FROM (SELECT) x LEFT JOIN unnest(back) b ON true;
END $$;

CREATE FUNCTION nodes_1() RETURNS TABLE (identity text, name text, tenure int, alive bool,
  draining bool, claims bigint, beat_age bigint, software text, card bytea, lost bool)
LANGUAGE sql STABLE AS $$
  SELECT n.identity, n.name, n.tenure, is_alive(n), n.draining,
    (SELECT count(*) FROM live v WHERE v.state = 1 AND v.tenure = n.tenure), ns(clock() - n.beat),
    n.software, n.card, n.lost
  FROM node n ORDER BY n.name, n.tenure $$;

CREATE FUNCTION drain_1(p_name text, p_draining bool) RETURNS bool LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE node n SET draining = p_draining WHERE n.name = p_name;
  RETURN FOUND;
END $$;

-- End the tenures of a name and forget what was declared; of live nodes only by force. Returns
-- nothing if there is no such node.
CREATE FUNCTION forget_1(p_name text, p_force bool) RETURNS TABLE (identity text, id text,
  waiter bigint, state smallint, lane int, held text, held_class text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE n node; back told[];
BEGIN
  FOR n IN SELECT * FROM node x WHERE x.name = p_name AND x.tenure <> 0 ORDER BY x.tenure LOOP
    PERFORM pg_advisory_xact_lock(@lock_3@, n.tenure);
  END LOOP;
  FOR n IN SELECT * FROM node x WHERE x.name = p_name ORDER BY x.tenure LOOP
    back := NULL;
    IF n.tenure <> 0 THEN
      PERFORM FROM node x WHERE x.identity = n.identity AND x.tenure = n.tenure
        AND (p_force OR NOT is_alive(x)) FOR UPDATE;
      CONTINUE WHEN NOT FOUND;  -- it lives, or has joined again meanwhile
      SELECT array_agg(x) INTO back FROM end_tenure(n.tenure) x;
    END IF;
    DELETE FROM node x WHERE x.identity = n.identity AND x.tenure = 0;
    CONTINUE WHEN NOT FOUND;
    DELETE FROM node_task x WHERE x.identity = n.identity;
    RETURN QUERY SELECT n.identity, b.* FROM (SELECT) x LEFT JOIN unnest(back) b ON true;
  END LOOP;
END $$;
