"""For the tests of browsers in trouble: a site that is no good, and a fleet seen from outside."""
