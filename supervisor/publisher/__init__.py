"""Publish events on a ZeroMQ socket, for programs in any language: a sidecar.

Nothing of libzmq is loaded anywhere else.

May import: alerts, api, config, ipc.errors, settings, sockets, system.
Not for: events that people are told of (alerts).
"""
