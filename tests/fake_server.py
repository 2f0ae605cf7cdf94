"""A server process over the fake executor, for tests that need a real one: signals, kills, TLS.

    python -m tests.fake_server '{"port": 0, ...}' '{"step_seconds": 0.01, ...}'

The first argument holds fields of `ServerConfig`, the second of the executor. The bound port is
printed as the first line.
"""

from __future__ import annotations

import json
import logging
import sys

from ds4jax_server.app import Server, run
from ds4jax_server.settings import Report, ServedModel, ServerConfig

from ds4jax.plan import Executor
from tests.serve_tools import fake, quick
from tests.text_tools import toy_tokenizer


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    config = json.loads(sys.argv[1])
    options = json.loads(sys.argv[2])

    def loader(report: Report) -> tuple[Executor, ServedModel]:
        tokenizer = toy_tokenizer()
        model = ServedModel(
            id="fake", display_name="Fake", vocab_size=tokenizer.vocab_size, tokenizer=tokenizer
        )
        return fake(**options), model

    def announce(server: Server) -> None:
        print(server.port, flush=True)

    settings = quick(watchdog=300.0)
    return run(ServerConfig(scheduler=settings, **config), loader, lanes=6, announce=announce)


if __name__ == "__main__":
    sys.exit(main())
