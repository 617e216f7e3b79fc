"""The tool: proofs, audits, fuzzing, selection and checks behind the command ``dosa``. Nobody imports this package."""
