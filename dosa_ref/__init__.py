"""The exact specification of DoSA's key selection.

Import the submodule that you need; this file stays empty of imports.
"""
