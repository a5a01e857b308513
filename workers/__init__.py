"""What runs inside a worker process, and the base classes users build on."""
