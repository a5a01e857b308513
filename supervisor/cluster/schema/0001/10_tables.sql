-- Tables of version 1. Only functions touch them; each function that others may call ends in _1.
--
-- Lock order, from first to last. Whoever holds something of a line waits only for lines below it.
--
--   life      the row of `life`, which the first to come makes after a crash
--   joining   advisory (5, 0); applying a policy (5, 1); partitions of `done` (6, 0)
--   tenure    advisory (3, tenure): shared by who claims, exclusive for who ends a tenure
--   pools     advisory (1, pool), in the order of their numbers
--   schedules rows of `schedule`, in the order of their names
--   keys      rows of `key`, in the order of the keys
--   forgetting lanes  advisory (8, 0): shared by who puts tasks into lanes, exclusive for who forgets
--   lanes     new rows of `lane`, in the order of (pool, level, target, class, on_open)
--   tasks     rows of `live`, in the order of their ids
--   results   rows of `watched`, in the order of the schedules
--   sites     rows of `site`, in the order of the targets; a claim never waits for one (SKIP LOCKED)
--   states    rows of `state`, in the order of the keys
--   good      rows of `good`, in the order of (name, key)
--   logins    rows of `login` and `login_task`, in the order of the sessions
--   locks     advisory (7, hash of the name), in that order: who takes locks of handlers
--   rest      everything else, one row at a time
--
-- The first number of an advisory lock is that of the cluster's schema plus this one (migrate.py).
--
-- Lanes and queued tasks (state 0) are changed only under their pool's lock. So a claim meets no
-- row that somebody else has locked, and `head` never passes a task. New tasks and new lanes are
-- inserted without that lock, because a submit waits for the disk: wake_1, after its commit, brings
-- their lanes back into the ring. What a dead client did not wake, tick_1 does.
--
-- Plans are made once in a session, often for an empty table, where every index looks alike. So a
-- statement leaves no choice (tests/cluster/test_plans.py). Where tasks are found by ids, sites or
-- classes, `state + 0` keeps it from the indexes of a state, which are full of dead entries.
-- Whether there is a task or a site is asked by a LIMIT 1: an EXISTS may read all of them at once.
-- An instant is compared by a variable: clock() is volatile, and no index is searched for it.
-- Functions that are called often are in PL/pgSQL, which keeps plans; SQL makes a plan at each call.

CREATE TABLE meta (
  one bool PRIMARY KEY DEFAULT true CHECK (one),
  version int NOT NULL,                 -- of this schema
  minimum int NOT NULL,                 -- the oldest version that programs may know and still use it
  cluster uuid NOT NULL DEFAULT gen_random_uuid());

CREATE SEQUENCE seq;
CREATE SEQUENCE tenure_seq AS int;
-- When somebody looked at everything, in milliseconds; later if that took long (is_turn, rest).
CREATE SEQUENCE tidied;
CREATE SEQUENCE shut_seen;
CREATE SEQUENCE repaired;

CREATE TABLE node (
  identity text PRIMARY KEY, name text NOT NULL, tenure int NOT NULL,  -- 0: it has left
  beat timestamptz NOT NULL, lease interval NOT NULL, epoch text NOT NULL,
  draining bool NOT NULL DEFAULT false, software text NOT NULL, card bytea NOT NULL,
  lost bool NOT NULL DEFAULT false      -- it was reaped, and has not come back
) WITH (fillfactor = 20);
CREATE INDEX node_tenure ON node (tenure) WHERE tenure <> 0;

CREATE TABLE pool (
  pool int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, name text NOT NULL UNIQUE,
  queue_size int NOT NULL, aging interval NOT NULL, max_crashes int NOT NULL,
  cache_ns bigint NOT NULL, debounce_ns bigint NOT NULL,
  -- As tick_1 saw it last: live tasks, and levels in which the next task of a lane has aged.
  counted bigint NOT NULL DEFAULT 0, aged int[] NOT NULL DEFAULT '{}');
CREATE TABLE tally (pool int NOT NULL, change int NOT NULL);  -- of live tasks, since then

-- What the code of a node has. It stays when the node leaves: tasks then wait for it.
CREATE TABLE node_task (
  identity text NOT NULL, name text NOT NULL, pool int NOT NULL, fallback_on text NOT NULL,
  cache_ns bigint NOT NULL, debounce_ns bigint NOT NULL, PRIMARY KEY (identity, name));
CREATE INDEX node_task_name ON node_task (name);
-- Every task that a node has ever declared: one that no node has any more may still be queued.
CREATE TABLE known_task (name text COLLATE "C" PRIMARY KEY, pool int NOT NULL);
CREATE INDEX known_task_pool ON known_task (pool);

-- The ring. state r: in the ring, e: empty, p: parked at its gate.
CREATE TABLE lane (
  lane int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, pool int NOT NULL, level smallint NOT NULL,
  target text COLLATE "C" NOT NULL, class text COLLATE "C" NOT NULL,
  on_open text COLLATE "C" NOT NULL,
  head bigint NOT NULL DEFAULT 0,       -- no queued task has this seq or a lower one
  state "char" NOT NULL DEFAULT 'r',
  wake_at timestamptz,                  -- when time alone opens the gate
  UNIQUE (pool, level, target, class, on_open)
) WITH (fillfactor = 50);
CREATE INDEX lane_ring ON lane (pool, level, lane) WHERE state = 'r';
CREATE INDEX lane_parked ON lane (pool, wake_at) WHERE state = 'p';
CREATE INDEX lane_target ON lane (target) WHERE target <> '';
CREATE INDEX lane_class ON lane (class, level) WHERE class <> '' AND state = 'p';

-- What a submit may leave out. NULL as a whole: it left out everything.
CREATE TYPE opts AS (
  timeout_ns bigint, max_retries int, delay_ns bigint, expires_ns bigint, cache_ns bigint,
  debounce_ns bigint, fallback bytea, fallback_on text, policy text, on_open text, watch bytea);
CREATE TYPE failed AS (attempt int, at timestamptz, worker text, failure bytea);

-- Columns stand by their width, which saves padding: a claim writes a whole row once more.
CREATE TABLE live (
  seq bigint NOT NULL, submitted_at timestamptz NOT NULL, queued_at timestamptz NOT NULL,
  waiter bigint NOT NULL DEFAULT 0, claim bigint, ready_at timestamptz, expires_at timestamptz,
  give_up_at timestamptz,               -- until then the next attempt waits for the retry budget
  progress_at timestamptz,
  lane int NOT NULL, owner oid NOT NULL, tenure int,
  attempt int NOT NULL DEFAULT 0, crashes int NOT NULL DEFAULT 0,
  interruptions int NOT NULL DEFAULT 0,
  probe int NOT NULL DEFAULT 0,         -- the half-open round that it probes
  fraction real,
  state smallint NOT NULL,              -- 0 queued, 1 claimed, 2 waiting, 3 joined
  priority smallint NOT NULL,
  begun bool NOT NULL DEFAULT false, cancel bool NOT NULL DEFAULT false,
  earned bool NOT NULL DEFAULT false,   -- the site's retry budget has counted its first attempt
  counted bool NOT NULL DEFAULT false,  -- the breaker has counted a failure of it
  asked bool NOT NULL DEFAULT false,    -- a run of a schedule that a person asked for or retried
  awaited bool NOT NULL DEFAULT false,  -- it has waited for the login task of its session
  id text COLLATE "C" PRIMARY KEY, name text COLLATE "C" NOT NULL, key text COLLATE "C",
  held text COLLATE "C",                -- the site in which this claim has a place
  held_class text COLLATE "C",
  args bytea NOT NULL, opts opts, error text, failures failed[], progress text
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2,
        autovacuum_vacuum_insert_scale_factor = 0.5);
CREATE INDEX live_queued ON live (lane, seq) WHERE state = 0;
CREATE INDEX live_named ON live (lane, name, seq) WHERE state = 0;  -- for nodes that lack others
CREATE INDEX live_claimed ON live (tenure) WHERE state = 1;
CREATE INDEX live_cancel ON live (tenure) WHERE state = 1 AND cancel;
CREATE INDEX live_held ON live (held) WHERE held IS NOT NULL;
CREATE INDEX live_held_class ON live (held_class) WHERE held_class IS NOT NULL;
CREATE INDEX live_waiting ON live (ready_at) WHERE state = 2;
-- Waiting and joined tasks, for idle_lanes. The abs() hides it from all others.
CREATE INDEX live_aside ON live (lane) WHERE abs(state) > 1;
CREATE INDEX live_unpaid ON live (lane) WHERE give_up_at IS NOT NULL;
CREATE INDEX live_expiring ON live (expires_at) WHERE expires_at IS NOT NULL AND state <> 1;
CREATE INDEX live_key ON live (key) WHERE key IS NOT NULL;
CREATE INDEX live_progress ON live (progress_at) WHERE progress_at IS NOT NULL;

-- Ended tasks, by time; retention drops a partition as a whole (retain_1).
CREATE TABLE done (
  id text COLLATE "C" NOT NULL, finished_at timestamptz NOT NULL, state smallint NOT NULL,
  value bytea NOT NULL, failure bytea, error text, attempts int NOT NULL, crashes int NOT NULL,
  run_ns bigint NOT NULL, source "char" NOT NULL DEFAULT '-',  -- s stale, c cached, f fallback
  xact xid8 NOT NULL DEFAULT pg_current_xact_id(),
  seq bigint NOT NULL, pool int NOT NULL, target text NOT NULL, class text NOT NULL,
  submitted_at timestamptz NOT NULL, waiter bigint NOT NULL, owner oid NOT NULL,
  name text COLLATE "C" NOT NULL, priority smallint NOT NULL, key text COLLATE "C",
  args bytea NOT NULL, opts opts, failures failed[],
  node text NOT NULL DEFAULT '',        -- that ran it last
  PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
CREATE INDEX done_waiter ON done (waiter, xact) WHERE waiter <> 0;
CREATE INDEX done_state ON done (state, finished_at) WHERE state <> 4;
CREATE INDEX done_time ON done USING brin (finished_at) WITH (pages_per_range = 16);  -- for people
CREATE TABLE done_rest PARTITION OF done DEFAULT;  -- empty unless nobody made partitions ahead

-- Keys in use, and what is remembered of them.
CREATE TABLE key (
  key text COLLATE "C" PRIMARY KEY, name text COLLATE "C", leader text COLLATE "C",
  since timestamptz, forget bool NOT NULL DEFAULT false);
CREATE TYPE ending AS (state smallint, value bytea, failure bytea, error text, attempts int,
  run_ns bigint, source "char");
CREATE TABLE recent (
  name text COLLATE "C", key text COLLATE "C", last ending NOT NULL, since timestamptz NOT NULL,
  good ending, good_at timestamptz, noted_at timestamptz NOT NULL, PRIMARY KEY (name, key));
CREATE TABLE good (
  name text COLLATE "C", key text COLLATE "C", value bytea NOT NULL, until timestamptz NOT NULL,
  PRIMARY KEY (name, key));

-- Policy, as applied, and as functions read it. The target '*' stands for all others.
CREATE TABLE policy (
  version int PRIMARY KEY, doc bytea NOT NULL, at timestamptz NOT NULL,
  cache bool NOT NULL, debounce bool NOT NULL, cache_entries int NOT NULL, breaker jsonb NOT NULL,
  windows bool NOT NULL);               -- a breaker of it counts over a window of calls
CREATE TABLE class (
  name text COLLATE "C" PRIMARY KEY, max_concurrent int NOT NULL, on_open text NOT NULL,
  fallback_on text NOT NULL, breaker jsonb);
CREATE TABLE target (
  target text COLLATE "C" PRIMARY KEY, class text NOT NULL, on_open text NOT NULL,
  fallback_on text NOT NULL, max_concurrent int NOT NULL, rate float8 NOT NULL,
  burst int NOT NULL, breaker jsonb, share float8, reserve float8 NOT NULL, every_ns bigint NOT NULL,
  limited bool GENERATED ALWAYS AS (max_concurrent > 0 OR rate > 0) STORED);

-- Sites that have limits, or whose breaker or budget is not as new. Places are counted over claims.
CREATE TABLE site (
  target text COLLATE "C" PRIMARY KEY, class text NOT NULL, limited bool NOT NULL,
  max_concurrent int NOT NULL, cost interval, burst int NOT NULL, breaker jsonb NOT NULL,
  tat timestamptz,                      -- the rate as GCRA: the theoretical arrival time
  state text NOT NULL DEFAULT 'closed', failures int NOT NULL DEFAULT 0,
  successes int NOT NULL DEFAULT 0, reopenings int NOT NULL DEFAULT 0, open_until timestamptz,
  round int NOT NULL DEFAULT 0, calls text NOT NULL DEFAULT '',  -- window: . f(ailed) s(low) b(oth)
  share bigint, full_units bigint NOT NULL, every_ns bigint NOT NULL,  -- NULL: no budget
  units bigint NOT NULL, earned_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE state (key text COLLATE "C" PRIMARY KEY, value bytea NOT NULL, until timestamptz);
CREATE INDEX state_until ON state (until) WHERE until IS NOT NULL;
-- Locks of handlers: nodes that have one or wait for it. The lowest number has it. A lock is as
-- good as the tenure of its node, and ends with that.
CREATE TABLE lock (
  name text COLLATE "C", token bigint, tenure int NOT NULL, holder text NOT NULL,
  number bigint NOT NULL DEFAULT nextval('seq'), PRIMARY KEY (name, token));
CREATE INDEX lock_line ON lock (name, number);
CREATE INDEX lock_tenure ON lock (tenure);
CREATE TABLE schedule (
  name text COLLATE "C" PRIMARY KEY, plan bytea NOT NULL, notify bool NOT NULL,
  paused bool NOT NULL DEFAULT false,
  turn bigint NOT NULL DEFAULT 0,       -- fences: it is another one after each settlement
  last_ns bigint NOT NULL DEFAULT 0, next_ns bigint DEFAULT 0, memory bytea NOT NULL DEFAULT '',
  runs bigint NOT NULL DEFAULT 0, skipped bigint NOT NULL DEFAULT 0,
  task text COLLATE "C", ran_ns bigint NOT NULL DEFAULT 0,  -- the newest run
  added bool NOT NULL DEFAULT false,    -- at run time, and not by a policy
  section bytea NOT NULL DEFAULT '');   -- its keys as they were given then
-- What metrics show of the whole cluster, as one of the nodes saw it last (statistics_1).
CREATE TABLE figures (
  one bool PRIMARY KEY DEFAULT true CHECK (one), at timestamptz NOT NULL, doc text NOT NULL,
  took interval NOT NULL);

-- Small words.
CREATE FUNCTION clock() RETURNS timestamptz LANGUAGE sql AS 'SELECT clock_timestamp()';
-- One life of the server: after a crash or a failover, claims may have been forgotten. A table that
-- is not logged is empty after both; where one process of the server died, nothing else tells of it.
CREATE UNLOGGED TABLE life (
  one bool PRIMARY KEY DEFAULT true CHECK (one), id uuid NOT NULL DEFAULT gen_random_uuid());
-- NULL: nobody has begun this life yet. Clean restarts are told apart, too.
CREATE FUNCTION epoch() RETURNS text LANGUAGE plpgsql STABLE AS $$
BEGIN
  RETURN (SELECT extract(epoch FROM pg_postmaster_start_time()) || ' ' || l.id FROM life l);
END $$;
-- For who says what he holds, before he has locked anything: others may wait for this row.
CREATE FUNCTION begin_life() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF (SELECT true FROM life) IS NULL THEN
    INSERT INTO life DEFAULT VALUES ON CONFLICT DO NOTHING;
  END IF;
END $$;
CREATE FUNCTION span(ns bigint) RETURNS interval LANGUAGE sql IMMUTABLE AS
  'SELECT make_interval(secs => ns / 1e9)';
CREATE FUNCTION ns(i interval) RETURNS bigint LANGUAGE sql IMMUTABLE AS
  'SELECT (extract(epoch FROM i) * 1000000000)::bigint';
CREATE FUNCTION me() RETURNS oid LANGUAGE sql STABLE AS
  'SELECT to_regrole(quote_ident(session_user))::oid';
-- The role that may see only its own tasks; NULL for nodes, administrators and the owner of the
-- schema (as whom functions run), who see all.
CREATE FUNCTION only_mine() RETURNS oid LANGUAGE sql STABLE AS $$
  SELECT CASE WHEN NOT (session_user = current_user
    OR pg_has_role(session_user, @node_name@, 'MEMBER')
    OR pg_has_role(session_user, @admin_name@, 'MEMBER')) THEN me() END $$;
-- Keys of a submitter are its own: no task of others joins its tasks, no result of others answers them.
-- What others than submitters write is shared by all of them.
CREATE FUNCTION scope(owner oid) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT E'\x01' || lpad(owner::text, 10, '0') || ':' $$;
CREATE FUNCTION scoped(key text) RETURNS text LANGUAGE sql STABLE AS
  $$ SELECT coalesce(scope(only_mine()), '') || key $$;
CREATE FUNCTION unscoped(key text) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT CASE WHEN starts_with(key, E'\x01') THEN substr(key, 13) ELSE key END $$;
CREATE FUNCTION is_shared(owner oid) RETURNS bool LANGUAGE sql STABLE AS $$
  SELECT coalesce((SELECT r.rolname = current_user OR pg_has_role(r.oid, @node_name@, 'MEMBER')
    OR pg_has_role(r.oid, @admin_name@, 'MEMBER') FROM pg_roles r WHERE r.oid = owner), false) $$;
CREATE FUNCTION version_1() RETURNS TABLE (version int, minimum int, cluster uuid)
LANGUAGE sql STABLE AS 'SELECT m.version, m.minimum, m.cluster FROM meta m';
-- msgpack of ipc.wire.messages.Failure, for failures that are made here.
CREATE FUNCTION packed(t text) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
  SELECT '\xdb'::bytea || int4send(octet_length(convert_to(t, 'UTF8'))) || convert_to(t, 'UTF8') $$;
CREATE FUNCTION failure(kind text, type text, message text) RETURNS bytea
LANGUAGE sql IMMUTABLE AS
  $$ SELECT '\x93'::bytea || set_byte('\xa0', 0, 160 + octet_length(kind)) || kind::bytea
    || packed(type) || packed(message) $$;  -- a kind has less than 32 ASCII characters
-- Whether a packed Failure says that the arguments do not fit: the caller's mistake.
CREATE FUNCTION is_invalid(failure bytea) RETURNS bool LANGUAGE sql IMMUTABLE AS
  $$ SELECT coalesce(substr(failure, 2, 8) = '\xa7'::bytea || 'invalid', false) $$;
-- Whether a task was refused, as it asked for (Failure.refused): it is no dead letter.
CREATE FUNCTION is_refused(failure bytea) RETURNS bool LANGUAGE sql IMMUTABLE AS
  $$ SELECT coalesce(substr(failure, 2, 5) = '\xa4'::bytea || 'open', false) $$;
-- The name of a task's results that have no key.
CREATE FUNCTION good_key(name text, key text, args bytea, owner oid) RETURNS text
LANGUAGE sql STABLE AS $$
  SELECT coalesce(key, CASE WHEN is_shared(owner) THEN '' ELSE scope(owner) END
    || name || ':' || encode(sha256(args), 'hex')) $$;
