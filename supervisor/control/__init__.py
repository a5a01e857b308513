"""Serve control.sock: callers, their rights, and one command for each method.

`server` owns the connections, `commands` turn a method into an event for the core or a question
to the store, and answer when it is done.

May import: api, core, core.model, core.tasks, ipc.wire, log, service, settings, sockets, store,
text, views.
Not for: deciding (core), wording of the answers' structs (api), tasks.sock and workers.sock
(sockets).
"""
