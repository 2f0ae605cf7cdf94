"""Several workers share the GPU: none may take most of its memory at the start."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
