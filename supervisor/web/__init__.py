"""Serve health checks, metrics and the dashboard over HTTP, in a process of its own.

The web process speaks to the daemon over control.sock, as musterctl does: its problems never
become problems of tasks. The daemon imports neither starlette nor uvicorn, nothing but
settings/sidecars.py (and `musterd check-config` token.py).

May import: api, config, ipc.errors, ipc.resilience, ipc.secrets, ipc.watching, ipc.wire, log,
settings, sockets, system, text.
Not for: anything the daemon needs: this is a sidecar.
"""
