"""Fetch pages and extract values from them, for the built-in workers and the toolkit.

`http` makes a request with every limit, `answers` parses what servers really send, `addresses` says
where requests may go, `extraction` and `page_reader` find values at a bounded cost.

May import: ipc.errors, ipc.secrets, ipc.wire, workers.authoring.
Not for: pages that need a browser (workers/browser).
"""
