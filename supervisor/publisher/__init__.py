"""The process that publishes events on a ZeroMQ socket, for programs in any language.

Nothing but process.py imports zmq, and only that process imports process.py.
"""
