"""The web process: health, metrics and a page of the fleet over HTTP.

It is a process of its own that speaks to the daemon over control.sock as musterctl does, so that
nothing that happens to it happens to tasks. The daemon never imports starlette or uvicorn: of this
package it knows settings/web.py alone.

May import: api, config, ipc.errors, ipc.resilience, ipc.secrets, ipc.wire, log,
settings, sockets, system, text.
Not for: anything that the daemon needs to work: it is a sidecar.
"""
