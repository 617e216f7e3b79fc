"""``python -m dosa_verify``: the command ``dosa`` from a checkout, and one clear line where a library is missing."""

import sys

# Without the libraries that every verb needs there is nothing to run: that is "backend not available", not a finding.
NOT_AVAILABLE = 3

if __name__ == "__main__":
    try:
        from dosa_verify.cli import main
    except ModuleNotFoundError as missing:
        sys.stderr.write(
            f"dosa: the Python package {missing.name} is not installed; every verb needs numpy, scipy, ml_dtypes,"
            " safetensors, mpmath, typer and rich. `make setup` installs all of it into .venv/\n"
        )
        sys.exit(NOT_AVAILABLE)
    main()
