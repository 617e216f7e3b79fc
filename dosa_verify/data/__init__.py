"""Package data: the bundled trace, and the command that cut it."""
