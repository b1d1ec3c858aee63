"""What the outside sees of the agent: metrics, the service manager's status line, node annotations and events."""
