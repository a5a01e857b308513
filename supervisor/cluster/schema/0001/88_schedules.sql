-- Schedules that people see, and those that are added at run time. A policy that is applied takes over
-- a schedule of the same name.

CREATE FUNCTION schedules_1(p_name text, p_after text, p_limit int) RETURNS TABLE (name text, plan bytea, turn bigint, last_ns bigint,
  now_ns bigint, memory bytea, alive text, retrying bool, asked text, next_ns bigint, paused bool,
  notify bool, runs bigint, skipped bigint, task text, ran_ns bigint, state smallint, added bool,
  section bytea, record bytea)
LANGUAGE sql STABLE AS $$
  SELECT s.name, s.plan, s.turn, s.last_ns, wall_ns(), s.memory, a.alive, a.retrying, a.asked,
    s.next_ns, s.paused, s.notify, s.runs, s.skipped, coalesce(s.task, ''), s.ran_ns, coalesce(
      (SELECT v.state FROM live v WHERE v.id = s.task),
      (SELECT d.state FROM done d WHERE d.id = s.task ORDER BY d.finished_at DESC LIMIT 1)),
    s.added, s.section, coalesce((SELECT w.record FROM watched w WHERE w.schedule = s.name), '')
  FROM schedule s, runs_alive(s.name) a WHERE (p_name = '' OR s.name = p_name) AND s.name > p_after
  ORDER BY s.name LIMIT p_limit $$;


-- Whether there are schedules: 0 none, 1 some, 2 some whose changes people want to know.
CREATE FUNCTION scheduled() RETURNS int LANGUAGE sql STABLE AS
  'SELECT coalesce(max(1 + s.notify::int), 0) FROM schedule s';

CREATE FUNCTION notify_nodes() RETURNS void LANGUAGE sql AS $$
  SELECT pg_notify(current_schema() || '_node_' || n.tenure, '') FROM node n WHERE n.tenure <> 0 $$;

-- Add schedules, or change those that were added; return why not, for each that was refused. A new
-- one begins as if that had been so long ago. Its memory is a node's (scheduler.py).
CREATE FUNCTION put_1(p_names text[], p_plans bytea[], p_notifies bool[], p_sections bytea[],
  p_agos bigint[], p_memories bytea[], p_paused bool[], p_replace bool)
RETURNS TABLE (name text, code text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE u record; s schedule; total int; size bigint; done_ bool := false;
BEGIN
  IF cardinality(p_names) > 1000 THEN
    RAISE EXCEPTION 'more than 1000 schedules at once' USING ERRCODE = '22023';
  END IF;
  PERFORM pg_advisory_xact_lock(@lock_5@, 1);  -- no policy is applied meanwhile
  SELECT count(*), coalesce(sum(octet_length(x.section)), 0) INTO total, size FROM schedule x;
  FOR u IN SELECT * FROM unnest(p_names, p_plans, p_notifies, p_sections, p_agos, p_memories, p_paused)
    AS x(name, plan, notify, section, ago, memory, paused) ORDER BY x.name COLLATE "C"
  LOOP
    name := u.name; code := NULL;
    SELECT * INTO s FROM schedule x WHERE x.name = u.name FOR UPDATE;
    IF s.name IS NOT NULL AND NOT s.added THEN code := 'ReadOnly';
    ELSIF s.name IS NOT NULL AND NOT p_replace THEN code := 'InUse';
    ELSIF octet_length(u.section) > 65536 OR octet_length(u.plan) > 131072
      OR length(u.name) NOT BETWEEN 1 AND 40 THEN code := 'InvalidSchedule';
    ELSIF (s.name IS NULL AND total >= 10000)
      OR size - coalesce(octet_length(s.section), 0) + octet_length(u.section) > 33554432
      THEN code := 'TooMany';
    END IF;
    IF code IS NOT NULL THEN RETURN NEXT; CONTINUE; END IF;
    INSERT INTO schedule AS x (name, plan, notify, section, added, last_ns, memory, paused)
    VALUES (u.name, u.plan, u.notify, u.section, true, wall_ns() - u.ago, u.memory, u.paused)
    ON CONFLICT (name) DO UPDATE SET plan = EXCLUDED.plan, notify = EXCLUDED.notify,
      section = EXCLUDED.section, paused = x.paused OR EXCLUDED.paused,
      turn = x.turn + (x.plan <> EXCLUDED.plan)::int,
      next_ns = CASE WHEN x.plan <> EXCLUDED.plan THEN 0 ELSE x.next_ns END;
    IF s.name IS NULL THEN total := total + 1;
    ELSIF s.notify AND NOT u.notify THEN PERFORM forget_results_of(ARRAY[u.name]);
    END IF;
    size := size - coalesce(octet_length(s.section), 0) + octet_length(u.section);
    done_ := true;
  END LOOP;
  IF done_ THEN PERFORM notify_nodes(); END IF;
END $$;

-- Forget schedules that were added, and their results; return why not, for each that was refused.
CREATE FUNCTION delete_1(p_names text[]) RETURNS TABLE (name text, code text)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE gone text[];
BEGIN
  PERFORM pg_advisory_xact_lock(@lock_5@, 1);
  RETURN QUERY SELECT u.n, CASE WHEN s.name IS NULL THEN 'UnknownSchedule' ELSE 'ReadOnly' END
  FROM unnest(p_names) u(n) LEFT JOIN schedule s ON s.name = u.n WHERE s.added IS NOT TRUE;
  SELECT array_agg(x.name) INTO gone FROM (SELECT s.name FROM schedule s
    WHERE s.name = ANY (p_names) AND s.added ORDER BY s.name FOR UPDATE) x;
  DELETE FROM schedule s WHERE s.name = ANY (gone);
  PERFORM forget_results_of(gone);
END $$;
