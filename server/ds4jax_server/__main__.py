"""`python -m ds4jax_server MODEL ...` is `ds4jax serve MODEL ...`."""

from __future__ import annotations

import sys

from ds4jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
