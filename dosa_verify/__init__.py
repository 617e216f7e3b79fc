"""The tool: proofs, audits, fuzzing, selection and checks behind the command ``dosa``. Nobody imports this package."""

__version__ = "0.1.0"
