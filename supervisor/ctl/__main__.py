"""`python -m musterd.supervisor.ctl` is musterctl."""

import sys

from musterd.supervisor.ctl import main

sys.exit(main())
