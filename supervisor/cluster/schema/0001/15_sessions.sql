-- Sessions: cookies and storage that the tasks of all nodes share, each used by one claim at a time.
--
-- A task with a session stands in a lane whose class is the session, in place of its resilience
-- class. Such a class has one place and no row in `class`: who claims from its lanes holds the
-- advisory lock (9, hash of the class), for which nobody waits, as for a class. What handlers keep of
-- a session is a state (85_handlers.sql), encrypted by them, and fenced by tenure and claim.

CREATE FUNCTION session_class(session text) RETURNS text LANGUAGE sql IMMUTABLE AS
  $$ SELECT E'\x02' || session $$;
CREATE FUNCTION is_session(class text) RETURNS bool LANGUAGE sql IMMUTABLE AS
  $$ SELECT starts_with(class, E'\x02') $$;
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
  SELECT CASE WHEN is_session(class) THEN class ELSE (
    SELECT c.name FROM class c WHERE c.name = $1 AND c.max_concurrent > 0) END $$;
-- The arguments by which results without a key are told apart: those of two sessions differ.
CREATE FUNCTION good_args(args bytea, class text) RETURNS bytea LANGUAGE sql IMMUTABLE AS
  $$ SELECT args || convert_to(coalesce(session_of(class), ''), 'UTF8') $$;
