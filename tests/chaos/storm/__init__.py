"""What the chaos tests share: the work that must not be lost, and everything that goes wrong."""
