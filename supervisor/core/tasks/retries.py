"""Retry budgets: limits retries to a share of a site's traffic; retries beyond it wait here.

Each first attempt that begins earns its site a share of a retry, and time earns a little
(RetryBudget). A retry is paid for when the attempt before it has failed. A retry that cannot be
paid for waits outside the lanes, where it blocks nobody. It goes on, the most urgent first, when
later first attempts or time have earned it.

Many retries may wait for a broken site, so each wait ends: when the retries that the task has left,
each after the longest pause, would be over. Then the task fails with the error of its last attempt.

Over a restart, a site's budget is a fact (BUDGET), written with each retry that is paid for and
forgotten when the budget is full again. Earnings between two writes are lost with the daemon: too
few retries are better than too many. A task that waits here is a fact too (UNPAID); all others have
paid.
"""

import msgspec
from msgspec import structs

from musterd.ipc.resilience.policy import SECOND_NS
from musterd.ipc.wire.messages import ERROR, FAILED, FAILURE_CHARS_MAX, Failure
from musterd.supervisor.core.model import events
from musterd.supervisor.core.model.gates import Site
from musterd.supervisor.core.model.ledger import UNPAID, Ledger
from musterd.supervisor.core.model.state import State
from musterd.supervisor.core.model.task import Debt, Task
from musterd.supervisor.core.tasks.gatekeeper import BUDGET, Gatekeeper
from musterd.supervisor.core.tasks.leases import Leases

# Only a task whose pool is gone keeps such a fact for long, as with a cancel.
UNPAID_TTL_NS = 30 * 24 * 3600 * SECOND_NS
BUDGET_TTL_NS = 7 * 24 * 3600 * SECOND_NS  # after a week without a retry the budget begins anew
MESSAGE_CHARS_MAX = FAILURE_CHARS_MAX - 1000  # leaves space for why the task ended
UNKNOWN_ERROR = Failure(ERROR, message="its errors are with its failed attempts")


class Retries:
    def __init__(self, state: State, ledger: Ledger, leases: Leases, keeper: Gatekeeper) -> None:
        self._state = state
        self._ledger = ledger
        self._leases = leases
        self._keeper = keeper
        self._unpaid: dict[str, None] = {}  # tasks that waited here before a restart

    def wait(self, task: Task, failure: Failure, ready_ns: int) -> None:
        """Schedule the next attempt, or put it off until it can be paid for."""
        site = task.gate.site if task.gate is not None else None
        if site is None or self._pay(site):
            self._leases.wait(task, ready_ns)
            return
        self._ledger.remember(UNPAID, task.spec.id, b"", ttl_ns=UNPAID_TTL_NS)
        self._put_off(task, site, failure, ready_ns)

    def _pay(self, site: Site) -> bool:
        if site.budget is None:
            return True
        site.budget.pass_time(self._state.now_ns)
        if not site.budget.spend():
            return False
        site.budget_noted = True
        units = msgspec.msgpack.encode(site.budget.units)
        self._ledger.remember(BUDGET, site.target, units, ttl_ns=BUDGET_TTL_NS)
        return True

    def _put_off(self, task: Task, site: Site, failure: Failure, ready_ns: int) -> None:
        left = max(1, task.max_retries - task.attempt + 1)
        until_ns = max(ready_ns, self._state.now_ns) + left * task.backoff.max_ns
        task.debt = Debt(site.debtors, failure)
        site.debtors.add(task)
        self._leases.put_off(task, ready_ns, until_ns, self._give_up)
        self._wait_for_time(site)

    def _wait_for_time(self, site: Site) -> None:
        at_ns = site.budget.affords_at_ns() if site.budget is not None and site.debtors else 0
        if at_ns and not site.earns_at_ns:
            site.earns_at_ns = max(at_ns, self._state.now_ns + 1)
            self._state.timers.at(site.earns_at_ns, self._time_passed, site)

    def _time_passed(self, site: Site) -> None:
        site.earns_at_ns = 0
        self.earned(site)
        self._wait_for_time(site)

    def earned(self, site: Site) -> None:
        """Pay for waiting retries, after first attempts have begun or time has passed."""
        while site.debtors:
            if not self._pay(site):
                return
            task = site.debtors.first()
            self._ledger.settle_debt(task)
            self._leases.take_up(task)
        if site.budget is not None and site.budget.full and site.budget_noted:
            site.budget_noted = False
            self._ledger.remember(BUDGET, site.target, None)

    def _give_up(self, task: Task, until_ns: int) -> None:
        debt = task.debt
        if debt is None or task.put_off_ns != until_ns:
            return
        task.route.pool.waiting -= 1
        why = f"not tried again: the retry budget of {task.spec.target} is used up"
        message = f"{debt.failure.message[:MESSAGE_CHARS_MAX]} ({why})"
        self._ledger.finish(task, FAILED, failure=structs.replace(debt.failure, message=message))

    def strand(self, task: Task) -> None:
        """Forget a task whose pool goes; if the pool comes back, the task waits here again."""
        if task.debt is not None:
            task.debt.debtors.remove(task)
            task.debt = None
            self._unpaid[task.spec.id] = None

    # -- over a restart -----------------------------------------------------------------------

    def recovered_unpaid(self, event: events.FactsRecovered) -> None:
        self._unpaid = {id_: None for id_, _ in event.facts}

    def recovered_budgets(self, event: events.FactsRecovered) -> None:
        for target, value in event.facts:
            site = self._keeper.site(target)
            if site.budget is None:
                self._ledger.remember(BUDGET, target, None)
            else:
                site.budget.restore(msgspec.msgpack.decode(value, type=int))
                site.budget_noted = True
                self._keeper.touch(site)

    def owes(self, task: Task, ready_ns: int) -> bool:
        """Return whether a task from before a restart waits here again."""
        id_ = task.spec.id
        if id_ not in self._unpaid:
            return False
        del self._unpaid[id_]
        task.gate = self._keeper.gate_for(task.spec)
        site = task.gate.site if task.gate is not None else None
        if site is None or self._pay(site):
            self._ledger.remember(UNPAID, id_, None)
            return False
        self._put_off(task, site, UNKNOWN_ERROR, ready_ns)
        return True
