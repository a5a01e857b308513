"""Serve control.sock: callers, their rights, and one command for each method.

`server` owns the connections, `access` says who may ask what. `commands` turn a method into an
event for the core or a request to the store; `answers` keeps what is answered later.

May import: api, core.model, core.tasks, ipc.wire, log, service, settings, shell, sockets, store,
views.
Not for: deciding (core), wording of the answers' structs (api), tasks.sock and workers.sock
(sockets).
"""
