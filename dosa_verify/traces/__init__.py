"""Traces of learned indexers on real text, made on demand: ``pack`` reads packages, ``make`` runs the model."""
