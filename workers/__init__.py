"""What runs inside a worker process, and what people build workers with."""
