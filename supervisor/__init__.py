"""The daemon and its tools. core/ decides, every other room acts; see docs/architecture.md."""
