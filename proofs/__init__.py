"""Lemmas behind the pruned path, their proofs, and the ledger that the gate reads. Import the submodule you need."""
