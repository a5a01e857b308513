-- Who may call what. Nobody touches a table, and nobody calls what does not end in _1.

REVOKE ALL ON SCHEMA @schema@ FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA @schema@ FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA @schema@ FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA @schema@ FROM PUBLIC;
GRANT USAGE ON SCHEMA @schema@ TO @submit_role@, @node_role@, @admin_role@;

DO $$
DECLARE
  f record;
  submitting text[] := '{submit_1,wake_1,ended_1,look_up_1,fetch_1,marks_1,view_1,cancel_1,retry_1,
    changes_1,cards_1,version_1,invalidate_1}';
  working text[] := '{give_back_1,join_1,rejoin_1,release_1,beat_1,leave_1,reap_1,claim_1,begun_1,finish_1,
    progress_1,tick_1,retain_1,state_load_1,state_save_1,states_1,locks_1,lock_wake_1,
    due_1,settle_1,make_way_1,ran_1,watched_1,judged_1,history_1,changed_1,untold_1,announce_1,
    told_1,schedules_1,put_1,delete_1,pause_1,policy_1,counts_1,
    statistics_1,nodes_1,sites_1,find_1,recent_1,redeclare_1,
    login_said_1,login_over_1,logins_due_1,granted_logins_1,logins_1,reset_login_1,sessions_1,
    session_load_1,forget_session_1}';
  ruling text[] := '{apply_1,policy_1,breaker_1,sites_1,nodes_1,drain_1,forget_1,reap_1,find_1,
    purge_1,recent_1,counts_1,statistics_1,tick_1,retain_1,schedules_1,
    settle_1,ran_1,pause_1,history_1,changed_1,put_1,delete_1,
    logins_1,reset_login_1,sessions_1,session_load_1,forget_session_1}';
BEGIN
  FOR f IN
    SELECT p.oid::regprocedure AS sign, p.proname AS name FROM pg_proc p
    WHERE p.pronamespace = to_regnamespace(quote_ident(@schema_name@)) AND p.proname LIKE '%\_1'
  LOOP
    -- The plans are known: no statistics of an empty table may change them.
    EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = @schema@, pg_temp '
      'SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off '
      'SET enable_mergejoin = off SET plan_cache_mode = force_generic_plan SET jit = off', f.sign);
    IF f.name = ANY (submitting) THEN
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO @submit_role@, @node_role@, @admin_role@', f.sign);
    END IF;
    IF f.name = ANY (working) THEN
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO @node_role@', f.sign);
    END IF;
    IF f.name = ANY (ruling) THEN
      EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO @admin_role@', f.sign);
    END IF;
  END LOOP;
END $$;
