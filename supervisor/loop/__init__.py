"""Run the daemon: poll, turn what happened into events, perform the core's actions.

`daemon` makes all parts and turns the loop; `perform` has one method for each action; `task_log`
and `dead_events` tell of tasks what the actions show.

May import: api, config, control, core, core.model, core.tasks, ipc.errors, ipc.wire, log, memory,
processes, service, settings, shell, sockets, store, system, views.
Not for: decisions (core), and any work that takes long (threads of store, memory, log; processes).
"""
