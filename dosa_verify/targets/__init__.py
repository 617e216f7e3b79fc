"""What can be put in front of the reference: adapters that all answer the same question."""
