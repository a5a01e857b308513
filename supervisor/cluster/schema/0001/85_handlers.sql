-- What running handlers share: states, locks, progress.

CREATE FUNCTION state_load_1(p_key text) RETURNS bytea LANGUAGE sql STABLE AS $$
  SELECT s.value FROM state s WHERE s.key = p_key AND (s.until IS NULL OR s.until > clock()) $$;

CREATE FUNCTION state_save_1(p_key text, p_value bytea, p_ttl bigint) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  IF p_value IS NULL THEN
    DELETE FROM state s WHERE s.key = p_key;
  ELSIF octet_length(p_value) > 1048576 OR length(p_key) > 200 THEN
    RAISE EXCEPTION 'a state has at most 1 MiB, and its key 200 characters' USING ERRCODE = '22023';
  ELSE
    INSERT INTO state VALUES (p_key, p_value, CASE WHEN p_ttl > 0 THEN later(p_ttl) END)
    ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value, until = EXCLUDED.until;
  END IF;
END $$;

-- Load and save states of attempts. A save is fenced by tenure and claim: the claim is locked, so
-- that its end comes before or after. `held` is false where the node does not have the claim.
CREATE FUNCTION states_1(p_tenure int, p_ids text[], p_claims bigint[], p_keys text[],
  p_saves bool[], p_values bytea[], p_ttls bigint[])
RETURNS TABLE (o bigint, held bool, value bytea) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE u record; n node := tenured(p_tenure);
BEGIN
  PERFORM FROM live x WHERE x.state = 1 AND x.tenure = p_tenure AND x.id IN (
    SELECT e.id FROM unnest(p_ids, p_saves) e(id, saves) WHERE e.saves) ORDER BY x.id FOR UPDATE;
  FOR u IN SELECT * FROM unnest(p_ids, p_claims, p_keys, p_saves, p_values, p_ttls)
    WITH ORDINALITY e(id, claim, key, saves, value, ttl, o) ORDER BY e.key COLLATE "C", e.o
  LOOP
    IF NOT u.saves THEN
      RETURN QUERY SELECT u.o, true, state_load_1(u.key);
      CONTINUE;
    END IF;
    PERFORM FROM live x WHERE x.id = u.id AND x.state = 1 AND x.tenure = p_tenure
      AND x.claim = u.claim;
    IF FOUND THEN PERFORM state_save_1(u.key, u.value, u.ttl); RETURN QUERY SELECT u.o, true, NULL::bytea;
    ELSE RETURN QUERY SELECT u.o, false, NULL::bytea;
    END IF;
  END LOOP;
END $$;

-- Take locks, wait for them, give them back. kinds: 0 want, 1 pass, 2 leave. `next` is the node to
-- be told (lock_wake_1, after the commit) that the lock is its now.
CREATE FUNCTION locks_1(p_tenure int, p_names text[], p_tokens bigint[], p_kinds smallint[],
  p_holders text[])
RETURNS TABLE (taken bool, holder text, next int) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE u record; l lock; n node;
BEGIN
  PERFORM pg_advisory_xact_lock_shared(@lock_3@, p_tenure);
  n := tenured(p_tenure);
  PERFORM pg_advisory_xact_lock(@lock_7@, x.h) FROM (
    SELECT DISTINCT hashtext(e.name) AS h FROM unnest(p_names) e(name) ORDER BY 1) x;
  FOR u IN SELECT * FROM unnest(p_names, p_tokens, p_kinds, p_holders)
    WITH ORDINALITY e(name, token, kind, holder, o) ORDER BY e.o
  LOOP
    SELECT * INTO l FROM lock x WHERE x.name = u.name ORDER BY x.number LIMIT 1;
    IF u.kind = 2 OR (u.kind = 1 AND l.token = u.token AND EXISTS (
      SELECT FROM lock x WHERE x.name = u.name AND x.token <> u.token)) THEN
      DELETE FROM lock x WHERE x.name = u.name AND x.token = u.token;
    END IF;
    IF u.kind <> 2 THEN
      INSERT INTO lock VALUES (u.name, u.token, p_tenure, u.holder)
      ON CONFLICT (name, token) DO NOTHING;
    END IF;
    SELECT * INTO l FROM lock x WHERE x.name = u.name ORDER BY x.number LIMIT 1;
    RETURN QUERY SELECT coalesce(l.token = u.token, false), coalesce(l.holder, ''),
      CASE WHEN u.kind <> 0 AND l.tenure <> p_tenure THEN l.tenure END;
  END LOOP;
END $$;

CREATE FUNCTION lock_wake_1(p_tenures int[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM set_config('synchronous_commit', 'off', true);
  PERFORM notify_nodes(p_tenures);
END $$;

-- How far the tasks of a waiter are that have said so of late; those that joined one, as well.
CREATE FUNCTION marks_1(p_waiter bigint, p_age bigint) RETURNS TABLE (id text, fraction real,
  progress text) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE mine oid := only_mine(); since timestamptz := clock() - span(p_age);
BEGIN
  IF p_waiter = 0 THEN RETURN; END IF;
  RETURN QUERY SELECT w.id, v.fraction, v.progress FROM live v CROSS JOIN LATERAL (
    SELECT v.id, v.waiter, v.owner
    UNION ALL SELECT x.id, x.waiter, x.owner FROM live x WHERE x.key = v.key AND x.state = 3) w
  WHERE v.progress_at > since AND w.waiter = p_waiter AND (mine IS NULL OR w.owner = mine)
  ORDER BY v.progress_at DESC LIMIT 10000;
END $$;
