"""Differential fuzzing: small, nasty problems, every variant of a target against the reference, bit for bit."""
