"""The ids of events that the journal's catalog explains (systemd/musterd.catalog).

An id never changes: scripts and alerts filter by it (`journalctl MESSAGE_ID=...`). Make a new one
with `systemd-id128 new`.
"""

MESSAGE_IDS = {
    "worker.crashed": "310c54def2f7498a974af225e7591a2c",
    "worker.hung": "ab07ffbf152c4065943c30c42b417da8",
    "worker.fatal": "db04afbb84114fd9b6f02bac9c815cd3",
    "pool.fatal": "bfe54a4835c34a98b5a6ff16ead99508",
    "memory.warning": "cf4c4c6e03904992bd2469717a4ba5ea",
    "memory.critical": "bebe5bb1e02c44dbae09b3eb3398e768",
    "breaker.open": "1def737c81aa4ff5a9e2e6f8f5fa9b85",
    "task.failed": "2a2b234ca0d2488ba1d697d3528f7972",
    "task.quarantined": "3fad40e566274498996705aea1e8c59e",
    "shutdown.phase": "f0f1b1803d9544d583778dd5806195a1",
    "store.failing": "7ee751ee15af45f28cebee9735d81c51",
    "log.left_out": "b6c5f2066ecc407eb8d1c65e3fc34d60",
    "config.refused": "6489a7123a094f109f6666a0df81752f",
    "cluster.unreachable": "0ab60f12c45c4225875f4af056eea701",
    "cluster.lease_over": "0309c12febfe4a378645cac5335c039c",
    "cluster.fenced": "dc9699bd20004ee8935ae83f3089c6dc",
    "cluster.fatal": "9c1d1b6a2fcd4665a8d1814d212a7162",
    "cluster.node_lost": "3330b850267649449e1b715a4c4d088f",
    "cluster.vacuum_stalled": "2df1ad6461294985824aea31a24f413f",
}
