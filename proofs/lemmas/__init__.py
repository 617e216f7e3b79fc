"""The lemmas, one theme per file. Every theme ends with an explicit tuple ``LEMMAS``."""
