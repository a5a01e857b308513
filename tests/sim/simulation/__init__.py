"""A simulated world around the real core: one seed decides everything that happens in it."""
