"""Measuring the prefill selection: what is timed, against whom, by which method, and the page made of it."""
