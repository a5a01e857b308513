-- Sessions: cookies and storage that the tasks of all nodes share, each used by one claim at a time.
--
-- A task with a session stands in a lane whose class is the session, in place of its resilience
-- class. Such a class has one place and no row in `class`: who claims from its lanes holds the
-- advisory lock (9, hash of the class), for which nobody waits, as for a class. What handlers keep of
-- a session is a state (85_handlers.sql), encrypted by them, and fenced by tenure and claim.

CREATE FUNCTION session_class(session text) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT E'\x02' || session $$;
-- The lane of a login task: it has the place of the session, and is granted while nothing else is.
CREATE FUNCTION login_class(session text) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT E'\x03' || session $$;
CREATE FUNCTION is_login(class text) RETURNS bool LANGUAGE sql IMMUTABLE AS
  $$ SELECT starts_with(class, E'\x03') $$;
CREATE FUNCTION is_session(class text) RETURNS bool LANGUAGE sql IMMUTABLE AS
  $$ SELECT starts_with(class, E'\x02') OR starts_with(class, E'\x03') $$;
CREATE FUNCTION session_of(class text) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT CASE WHEN is_session(class) THEN substr(class, 2) END $$;
-- The resilience class of a task, for the node that runs it.
CREATE FUNCTION policy_of(class text, opts opts, target text) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN NOT is_session(class) THEN class ELSE coalesce((opts).policy,
    CASE WHEN target <> '' THEN (SELECT t.class FROM target t WHERE t.target IN ($3, '*')
      ORDER BY t.target = '*' LIMIT 1) END, '') END $$;
-- The class in which a claim from this lane has a place; NULL: none.
CREATE FUNCTION place_of(class text) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN is_session(class) THEN session_class(session_of(class)) ELSE (
    SELECT c.name FROM class c WHERE c.name = $1 AND c.max_concurrent > 0) END $$;
-- The arguments by which results without a key are told apart: those of two sessions differ.
CREATE FUNCTION good_args(args bytea, class text) RETURNS bytea LANGUAGE sql IMMUTABLE AS
  $$ SELECT args || convert_to(coalesce(session_of(class), ''), 'UTF8') $$;


-- Sessions whose logins have failed in a row (supervisor/cluster/logging_in.py), in the order of whose
-- names rows are locked. One claim uses a session at a time, so a pause needs no probes.
CREATE TABLE login (
  session text COLLATE "C" PRIMARY KEY, failures int NOT NULL,
  pauses int NOT NULL,                  -- how often it was held without a login that worked
  until timestamptz,                    -- no login is tried before
  problem text NOT NULL, node text NOT NULL, at timestamptz NOT NULL);

-- The last login task of each session. While one is under way, no other task of the session is granted.
CREATE TABLE login_task (
  session text COLLATE "C" PRIMARY KEY, task text COLLATE "C" NOT NULL,  -- its id
  name text NOT NULL, args bytea NOT NULL, since timestamptz NOT NULL,
  ok bool, problem text NOT NULL DEFAULT '');  -- NULL: it is under way

CREATE FUNCTION is_logging_in(p_session text) RETURNS bool LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
  RETURN coalesce((SELECT true FROM login_task t WHERE t.session = p_session AND t.ok IS NULL), false);
END $$;

-- A login task has ended; NULL: it has worked.
CREATE FUNCTION login_over_1(p_session text, p_task text, p_problem text) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  UPDATE login_task t SET ok = p_problem IS NULL, problem = coalesce(p_problem, '')
  WHERE t.session = p_session AND t.task = p_task AND t.ok IS NULL;
END $$;

-- Count what attempts say about logins, in the transaction that ends them. The node gives only those
-- of ends that have counted. said: 0 worked, 1 failed, 2 wanted. Login tasks that are wanted now are
-- submitted after the commit, which takes lanes; those that nobody submits then, a tick finds.
CREATE FUNCTION login_said_1(p_tenure int, p_ids text[], p_sessions text[], p_said smallint[],
  p_failures int[], p_pauses bigint[], p_mosts bigint[], p_problems text[], p_names text[],
  p_args bytea[]) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE u record; l login; changed bool := false;
BEGIN
  FOR u IN SELECT * FROM unnest(p_ids, p_sessions, p_said, p_failures, p_pauses, p_mosts, p_problems,
    p_names, p_args) WITH ORDINALITY
    e(id, session, said, failures, pause, most, problem, name, args, o)
    ORDER BY e.session COLLATE "C", e.o
  LOOP
    IF u.said = 2 THEN
      UPDATE live x SET awaited = true WHERE x.id = u.id;
      INSERT INTO login_task AS t VALUES (u.session, 'login-' || substr(md5(random()::text), 1, 16),
        u.name, u.args, clock(), NULL, '')
      ON CONFLICT (session) DO UPDATE SET task = EXCLUDED.task, name = EXCLUDED.name,
        args = EXCLUDED.args, since = EXCLUDED.since, ok = NULL, problem = ''
      WHERE num_nonnulls(t.ok) > 0;
      CONTINUE;
    ELSIF u.said = 0 THEN
      DELETE FROM login x WHERE x.session = u.session;
      changed := changed OR FOUND;
      CONTINUE;
    END IF;
    INSERT INTO login AS x VALUES (u.session, 1, 0, NULL, u.problem, node_of(p_tenure), clock())
    ON CONFLICT (session) DO UPDATE SET failures = x.failures + 1, problem = EXCLUDED.problem,
      node = EXCLUDED.node, at = EXCLUDED.at WHERE x.until IS NULL OR x.until <= clock()
    RETURNING * INTO l;
    CONTINUE WHEN NOT FOUND;  -- it was granted before
    changed := true;
    IF l.pauses > 0 OR l.failures >= u.failures THEN
      UPDATE login x SET pauses = l.pauses + 1,
        until = clock() + span(least(u.most, u.pause * 2::float8 ^ least(l.pauses, 40))::bigint)
      WHERE x.session = u.session;
    END IF;
  END LOOP;
  IF changed THEN PERFORM notify_nodes(); END IF;
END $$;

-- Login tasks that are wanted and were not submitted yet. What nobody has run for so long is over.
CREATE FUNCTION logins_due_1(p_wait bigint) RETURNS TABLE (session text, task text, name text,
  args bytea) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE g login_task;
BEGIN
  FOR g IN SELECT * FROM login_task t WHERE t.ok IS NULL ORDER BY t.session LIMIT 100 LOOP
    CONTINUE WHEN EXISTS (SELECT FROM live v WHERE v.id = g.task);
    IF g.since <= clock() - span(p_wait) THEN
      PERFORM login_over_1(g.session, g.task, 'nobody has run it');
    ELSE
      session := g.session; task := g.task; name := g.name; args := g.args;
      RETURN NEXT;
    END IF;
  END LOOP;
END $$;

-- What nodes have to know of attempts of sessions that were just granted to them. A session has one
-- claim at a time, so nobody but a person changes that meanwhile.
CREATE FUNCTION granted_logins_1(p_ids text[]) RETURNS TABLE (id text, again bool, session text,
  task text, error text, failures int, left_ns bigint, problem text, node text)
LANGUAGE sql STABLE AS $$
  SELECT v.id, coalesce(v.awaited AND t.ok, false), session_of(y.class), t.task,
    CASE WHEN v.awaited AND NOT t.ok THEN t.problem END, l.failures, ns(l.until - clock()), l.problem,
    l.node
  FROM live v JOIN lane y ON y.lane = v.lane
  LEFT JOIN login_task t ON t.session = session_of(y.class)
  LEFT JOIN login l ON l.session = session_of(y.class) AND l.until > clock()
  WHERE v.id = ANY (p_ids) $$;

CREATE FUNCTION logins_1(p_sessions text[]) RETURNS TABLE (session text, failures int,
  left_ns bigint, problem text, node text) LANGUAGE sql STABLE AS $$
  SELECT l.session, l.failures, greatest(0, coalesce(ns(l.until - clock()), 0)), l.problem, l.node
  FROM login l WHERE p_sessions IS NULL OR l.session = ANY (p_sessions)
  ORDER BY l.session LIMIT 1000 $$;

CREATE FUNCTION reset_login_1(p_session text) RETURNS bool LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
  DELETE FROM login x WHERE x.session = p_session;
  IF NOT FOUND THEN RETURN false; END IF;
  PERFORM notify_nodes();
  RETURN true;
END $$;

-- What is kept of a session, which handlers have encrypted.
CREATE FUNCTION session_load_1(p_session text) RETURNS bytea LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN state_load_1('session:' || p_session);
END $$;

CREATE FUNCTION forget_session_1(p_session text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM state s WHERE s.key = 'session:' || p_session AND (s.until IS NULL OR s.until > clock());
  RETURN FOUND;
END $$;

-- Sessions that are kept, or used by live tasks; of those that wait 1,000 are counted.
CREATE FUNCTION sessions_1() RETURNS TABLE (session text, kept int, running bigint, waiting bigint,
  login text) LANGUAGE sql STABLE AS $$
  SELECT * FROM (
    SELECT n.session, coalesce((SELECT octet_length(s.value) FROM state s
        WHERE s.key = 'session:' || n.session AND (s.until IS NULL OR s.until > clock())), 0) AS kept,
      (SELECT count(*) FROM live v
        WHERE v.held_class = session_class(n.session) AND v.state + 0 = 1) AS running,
      (SELECT count(*) FROM (SELECT FROM lane l, LATERAL (
          SELECT FROM live v WHERE v.lane = l.lane AND v.state = 0 LIMIT 1000) v
        WHERE l.class = session_class(n.session) LIMIT 1000) w) AS waiting,
      coalesce((SELECT t.task FROM login_task t WHERE t.session = n.session AND t.ok IS NULL), '')
    FROM (
      SELECT substr(s.key, 9) AS session FROM state s
      WHERE s.key >= 'session:' COLLATE "C" AND s.key < 'session;' COLLATE "C"
      UNION SELECT session_of(l.class) FROM lane l WHERE is_session(l.class)) n) x
  WHERE x.kept > 0 OR x.running > 0 OR x.waiting > 0
  ORDER BY x.session LIMIT 1000 $$;
