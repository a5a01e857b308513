"""Tasks of the store that an earlier release wrote."""

from musterd import Permanent, Worker, task


class Jobs(Worker):
    @task
    def double(self, ctx, n: int) -> int:
        return 2 * n

    @task
    def count(self, ctx) -> int:
        """Count the task's own calls, in its state."""
        done = ctx.state.load("calls", 0) + 1
        ctx.state.save(done, "calls", keep=True)
        return done

    @task(max_retries=0)
    def fail(self, ctx) -> None:
        raise Permanent("as it was told")
