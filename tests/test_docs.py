"""What the documents promise: the two commands, every command of the CLI, every format."""

from __future__ import annotations

import re
from pathlib import Path

from ds4jax import commands, formats

REPO = Path(__file__).parents[1]
RUN = """pip install . && ds4jax generate --raw -p "def fibonacci(n):\""""
TEST = "pip install -e '.[test]' && pytest"


def read(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


def test_the_two_commands_of_the_readme() -> None:
    blocks = [b.strip() for b in re.findall(r"```\n(.*?)```", read("README.md"), re.DOTALL)]
    assert RUN in blocks and TEST in blocks
    assert blocks.index(RUN) < blocks.index(TEST)
    assert TEST in read(".ci/run"), "CI runs what the README says"


def test_every_command_is_documented() -> None:
    text = read("docs/cli.md")
    assert all(re.search(rf"\b{name}\b", text) for name in commands.COMMANDS)


def test_every_format_is_documented() -> None:
    text = read("docs/formats.md")
    for name in formats.FORMATS:
        short = name.removeprefix("rocmfp2") if name.startswith("rocmfp2_") else name
        assert f"`{name}`" in text or f"`{short}`" in text or name == "i32", name


def test_links_lead_somewhere() -> None:
    for page in ["README.md", *(f"docs/{p.name}" for p in (REPO / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)\)", read(page)):
            assert (REPO / page).parent.joinpath(target).exists(), f"{page}: {target}"
