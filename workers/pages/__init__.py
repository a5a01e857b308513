"""Fetch pages and extract values from them, for the built-in workers and the toolkit.

`http` makes a request with every limit, `answers` parses what servers really send, `addresses` says
where requests may go, `extraction` and `page_reader` find values at a bounded cost. `conditional`
asks whether a page has changed, `proxies` takes turns, `robots` keeps to robots.txt, `fetchers` has
another library fetch, `kinds` tells challenges and login forms from pages.

May import: ipc.errors, ipc.secrets, ipc.watching, ipc.wire, workers.authoring.
Not for: pages that need a browser (workers/browser).
"""
