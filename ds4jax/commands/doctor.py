"""`ds4jax doctor`: versions, devices, what works, and what to set."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING, Any

from ds4jax.commands import common

if TYPE_CHECKING:
    from ds4jax.system import Advice, Facts


def add(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, what works, what to set",
        description="Look at the installation, the GPUs and the environment, and let JAX compute a"
        " little in a process of its own. Exit status 1 if something is wrong.",
    )
    parser.add_argument(
        "--timeout", type=common.number(1, 3600), default=120, metavar="SECONDS",
        help="for JAX to start and answer",
    )  # fmt: skip
    parser.add_argument("--no-device", action="store_true", help="do not start JAX")
    common.add_output(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings."""
    from ds4jax import system

    facts = system.gather(os.environ)
    if not args.no_device:
        facts = dataclasses.replace(facts, jax=system.probe_jax(args.timeout))
    advice = system.advise(facts)
    works = not any(a.level == "error" for a in advice)
    if args.json:
        listed = [dataclasses.asdict(a) for a in advice]
        common.print_json({**facts.as_dict(), "advice": listed, "works": works})
    else:
        _print(facts, advice)
    return 0 if works else 1


def _print(facts: Facts, advice: list[Advice]) -> None:
    def row(label: str, text: str) -> None:
        print(f"{label:<12}{text}")

    row("python", facts.python)
    row("system", facts.system)
    if facts.memory_bytes:
        row("memory", common.size_text(facts.memory_bytes))
    row("packages", ", ".join(f"{n} {v}" for n, v in facts.packages.items() if v))
    if facts.rocm_version:
        row("rocm", facts.rocm_version)
    if facts.nvidia_driver:
        row("nvidia", f"driver {facts.nvidia_driver}")
    for gpu in facts.gpus:
        links = f", direct links to nodes {', '.join(map(str, gpu.links))}" if gpu.links else ""
        row("gpu", f"node {gpu.node}: {gpu.gfx}, {common.size_text(gpu.memory_bytes)}{links}")
    for device in (facts.jax or {}).get("devices", ()):
        limit = device["memory_bytes"]
        usable = f", {common.size_text(limit)} usable" if limit else ""
        row("device", f"{device['platform']}:{device['id']} {device['kind']}{usable}")
    for name, value in facts.environment.items():
        row("environment", f"{name}={value}")
    for item in advice:
        row(item.level, item.what + (f": {item.fix}" if item.fix else ""))
