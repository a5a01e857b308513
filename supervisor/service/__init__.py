"""Be a good service: systemd, reload, problems, one instance, install, manual pages.

`systemd_status` and `notify` speak to systemd, `reload` reads the configuration again, `newer_code`
tells what has changed beside it, `check_config` asks the machine whether a configuration can work,
`wall_clock` reads the clock, which core/model/clock.py doubts.

May import: api, config, core, core.model, ipc.client, ipc.errors, ipc.secrets, ipc.user_code,
ipc.wire, log, processes, settings, shell, sockets, store, system, text, views, web.
Not for: units and drop-ins (the folder systemd/).
"""
