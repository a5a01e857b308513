"""Run many seeds outside of the test suite: `python tests/sim --seeds 20000 --start 0`."""

import argparse
import sys
import time
import traceback

from simulation.cluster import ClusterWorld
from simulation.profile import PROFILES
from simulation.runner import SeedFailed, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the simulation of the core on many seeds.")
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--start", type=int, default=0, help="the first one (default 0)")
    parser.add_argument("--profile", choices=[each.name for each in PROFILES], default=None)
    parser.add_argument("--cluster", action="store_true", help="several nodes around one engine")
    parser.add_argument("--failures", type=int, default=5, help="stop after this many")
    options = parser.parse_args()
    began = time.monotonic()
    steps = failed = ran = 0
    run = run_cluster if options.cluster else run_seed
    for seed in range(options.start, options.start + options.seeds):
        if options.profile and PROFILES[seed % len(PROFILES)].name != options.profile:
            continue
        ran += 1
        try:
            steps += run(seed)
        except SeedFailed:
            traceback.print_exc()
            failed += 1
            if failed == options.failures:
                break
    took = time.monotonic() - began
    print(f"{ran} seeds, {steps} steps, {failed} failed, {took:.1f} s")
    return 1 if failed else 0


def run_cluster(seed: int) -> int:
    """Run one scenario of several nodes; return its steps."""
    world = ClusterWorld(seed)
    world.run()
    return world.steps


if __name__ == "__main__":
    sys.exit(main())
