"""Audits: what number formats and libraries really do, side by side, with every disagreement listed."""
