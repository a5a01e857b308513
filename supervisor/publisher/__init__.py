"""Publish events on a ZeroMQ socket, for programs in any language: a sidecar.

No other process loads libzmq.

May import: alerts, api, config, ipc.errors, settings, sockets, system.
Not for: messages to people (alerts).
"""
