"""The data of ds4-nano: text of Python's standard library and generated chat turns, as token ids.

Everything comes from the Python that runs this and from `bench.nano_tasks`, by fixed rules and one
seed; nothing is downloaded. Files are held out by a hash of their path, chat instances by a hash of
the question, so that two machines hold out the same ones. No JAX here.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sysconfig
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from bench import nano_tasks
from ds4jax import chat
from ds4jax.chat_request import ChatRequest, Message
from ds4jax.tokenizer import MARKER_SPELLINGS, OFFICIAL_IDS, Piece, Tokenizer, pre_tokenizer

PROFILE: Any = "v4-0731"
U16 = npt.NDArray[np.uint16]

VOCAB = 3072
CONVERSATIONS = 190_000
"""Sizes of the corpus that the model in the package was trained on."""

QUIET = 1 << 15
"""Bit of a stored id: the token is context (a question, a prompt), not to be learnt by heart."""

SKIPPED = frozenset((
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings",
    "pydoc_data", "__phello__", "lib2to3", "distutils", "idlelib", "turtledemo",
))  # fmt: skip
"""Folders left out: not everywhere installed, gone in newer versions, or tables instead of text."""


BUNDLED = "ensurepip/_bundled/"
"""Where the standard library keeps the wheels (pip) that it installs; some systems leave it out."""


@dataclass(frozen=True)
class Source:
    """One file of the standard library."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether it is for judging only: about one file of the library itself in twenty."""
        return (
            not self.path.startswith(BUNDLED)
            and hashlib.sha256(self.path.encode()).digest()[0] < 13
        )


def sources() -> list[Source]:
    """Python files of the standard library and its wheels, pydoc's topics; in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    out = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED & set(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if 200 <= len(text) <= 400_000:
            out.append(Source("/".join(parts), text))
    for path in sorted((root / BUNDLED).glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                text = wheel.read(name).decode(errors="ignore") if name.endswith(".py") else ""
                if 200 <= len(text) <= 100_000 and max(map(len, text.splitlines())) < 200:
                    out.append(Source(f"{BUNDLED}{path.name}/{name}", text))
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        out.append(Source(f"pydoc_data/{name}", text.strip() + "\n"))
    return out


def snippets(text: str) -> Iterator[str]:
    """Functions and classes of a source, each on its own, at the left margin."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            if 60 <= len(code) <= 1600:
                yield code.rstrip() + "\n"


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of this model family with all its markers; digits never merge."""
    markers = list(OFFICIAL_IDS)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - len(markers),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), pre_tokenizer()]
    )
    bpe.train_from_iterator(texts, trainer)
    model = json.loads(bpe.to_str())["model"]
    base = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = markers[:3] + base + markers[3:]
    added = {m: tokens.index(m) for m in markers}
    pairs = (m if isinstance(m, list) else m.split(" ") for m in model["merges"])
    merges = [(left, right) for left, right in pairs]
    return Tokenizer.from_vocab(tokens, merges, added, vocab_size=vocab_size)


def answer_pieces(task: nano_tasks.Task, thinking: bool) -> tuple[Piece, ...]:
    """What the model must say, end marker included, as the renderer would put it into a history."""
    messages = (
        Message(role="user", content="?"),
        task.reply(thinking),
        Message(role="user", content="?"),
    )
    request = ChatRequest(
        messages=messages, tools=task.tools, thinking=thinking, effort="low", drop_thinking=False
    )
    pieces = chat.render(request, PROFILE).pieces
    user, assistant = MARKER_SPELLINGS["user"], MARKER_SPELLINGS["assistant"]
    starts = [i for i, p in enumerate(pieces) if p == Piece(assistant, True)]
    ends = [i for i, p in enumerate(pieces) if p == Piece(user, True)]
    return tuple(pieces[starts[0] + 2 : ends[1]])  # the opener belongs to the prompt


class Encoder:
    """Pieces to ids, with a memory for the long texts that recur."""

    def __init__(self, tok: Tokenizer) -> None:
        self.tok = tok
        self._known: dict[tuple[Piece, ...], list[int]] = {}

    def pieces(self, pieces: tuple[Piece, ...]) -> list[int]:
        """Ids of rendered pieces."""
        out: list[int] = []
        for piece in pieces:
            key = (piece,)
            if key not in self._known:
                ids = self.tok.encode_pieces([piece])
                if len(piece.text) < 120 and not piece.special:
                    out += ids
                    continue
                self._known[key] = ids
            out += self._known[key]
        return out


def conversation(
    encoder: Encoder,
    rng: random.Random,
    *,
    held_out: bool,
    shares: Mapping[str, float] | None = None,
) -> U16:
    """One training document: a prompt (quiet) and its answer; sometimes after an earlier turn."""
    task = nano_tasks.draw(rng, held_out=held_out, shares=shares)
    thinking = rng.random() < 0.55
    effort = "high" if rng.random() < 0.2 else "low"
    request = task.request(thinking=thinking, effort=effort)
    if rng.random() < 0.1 and not task.tools:
        earlier = nano_tasks.draw(rng, held_out=held_out, name=rng.choice(["sum", "sort", "talk"]))
        history = (*earlier.history(), earlier.reply(thinking), *task.history())
        request = ChatRequest(messages=history, thinking=thinking, effort=effort)
    prompt = encoder.pieces(chat.render(request, PROFILE).pieces)
    answer = encoder.pieces(answer_pieces(task, thinking))
    return np.array([i | QUIET for i in prompt] + answer, np.uint16)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents one after the other, each from its begin marker on."""

    ids: U16
    starts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, documents: list[U16]) -> Stream:
        """Join documents."""
        lengths = np.array([0] + [len(d) for d in documents[:-1]])
        return cls(ids=np.concatenate(documents), starts=np.cumsum(lengths).astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Streams by name ("text", "snippets", "chat", "held_text", "held_chat") and the tokenizer."""

    streams: dict[str, Stream]
    tokenizer: Tokenizer
    held_bytes: int  # UTF-8 bytes of the held-out text, markers not counted

    def save(self, folder: Path) -> None:
        """Two files: corpus.npz and tokenizer.json of plain parts."""
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {f"{k}.ids": s.ids for k, s in self.streams.items()}
        arrays |= {f"{k}.starts": s.starts for k, s in self.streams.items()}
        np.savez_compressed(folder / "corpus.npz", **arrays, held_bytes=np.int64(self.held_bytes))
        (folder / "tokenizer.json").write_text(json.dumps(self.tokenizer.to_gguf_metadata()))

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """What `save` wrote."""
        with np.load(folder / "corpus.npz") as arrays:
            names = [k.removesuffix(".ids") for k in arrays.files if k.endswith(".ids")]
            streams = {
                n: Stream(ids=arrays[f"{n}.ids"], starts=arrays[f"{n}.starts"]) for n in names
            }
            held = int(arrays["held_bytes"])
        metadata = json.loads((folder / "tokenizer.json").read_text())
        return cls(streams=streams, tokenizer=Tokenizer.from_gguf(metadata), held_bytes=held)


class LineEnds:
    """Splits tokens that end a line, as the last token of a prompt is split.

    The vocabulary has tokens such as "):" + newline. A prompt that ends in "):" holds another
    token, after which such text never showed a newline; so some documents spell it in two tokens.
    """

    def __init__(self, tok: Tokenizer) -> None:
        self.parts: dict[int, list[int]] = {}
        for token in range(tok.vocab_size):
            if token in tok.specials.values():
                continue
            raw = tok.bytes_of(token)
            head = raw.rstrip(b"\n")
            if head and head != raw and not head.isspace():
                halves = (head.decode(), raw[len(head) :].decode())
                self.parts[token] = [i for half in halves for i in tok.encode(half, markers=False)]

    def split(self, ids: U16, rng: random.Random, first: float, other: float) -> U16:
        """A document with its first line end split with one probability, the others with another.

        Probabilities are drawn once for the first and once for each of the others.
        """
        out: list[int] = []
        chance = first
        for token in ids.tolist():
            if token in self.parts:
                out += self.parts[token] if rng.random() < chance else [token]
                chance = other
            else:
                out.append(token)
        return np.array(out, np.uint16)


def build(
    *,
    vocab_size: int,
    conversations: int,
    seed: int = 0,
    max_files: int = 10**9,
    tokenizer: Tokenizer | None = None,
    shares: Mapping[str, float] | None = None,
) -> Corpus:
    """Make the corpus.

    Args:
        vocab_size: of the tokenizer trained here. conversations: training chat documents; a
            fiftieth of that is held out. max_files: fewer files, for tests. tokenizer: one that
            exists, instead of training one. shares: of the training tasks, see `nano_tasks.draw`.
    """
    files = sources()
    held = [s for s in files if s.held_out][:max_files]
    train = [s for s in files if not s.held_out][:max_files]
    rng = random.Random(seed)
    sample = [nano_tasks.draw(rng, held_out=False) for _ in range(3000)]

    def tokenizer_texts() -> Iterator[str]:
        yield from (s.text for s in train)
        for task in sample:
            yield from (p.text for p in chat.render(task.request(thinking=True), PROFILE).pieces)
            yield from (p.text for p in answer_pieces(task, True))

    tok = tokenizer or train_tokenizer(tokenizer_texts(), vocab_size)
    begin, end = [tok.markers.bos], [tok.markers.eos]

    def document(text: str) -> U16:
        return np.array(begin + tok.encode(text, markers=False) + end, np.uint16)

    codes = [code for s in train for code in snippets(s.text)]
    codes += [
        nano_tasks.function_source(rng, which)[1]
        for which in range(len(nano_tasks.FUNCTIONS))
        for _ in range(max(1, conversations // 2500))
    ]
    rng.shuffle(codes)
    ends = LineEnds(tok)
    encoder = Encoder(tok)
    chats = [
        conversation(encoder, rng, held_out=False, shares=shares) for _ in range(conversations)
    ]
    held_chats = [
        conversation(encoder, rng, held_out=True) for _ in range(max(20, conversations // 50))
    ]
    streams = {
        "text": Stream.of([ends.split(document(s.text), rng, 0.05, 0.05) for s in train]),
        "snippets": Stream.of([ends.split(document(code), rng, 0.5, 0.05) for code in codes]),
        "chat": Stream.of(chats),
        "held_text": Stream.of([document(s.text) for s in held]),
        "held_chat": Stream.of(held_chats),
    }
    return Corpus(
        streams=streams, tokenizer=tok, held_bytes=sum(len(s.text.encode()) for s in held)
    )


def main() -> None:
    """Build the corpus and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.nano_corpus")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--tokenizer", type=Path, help="folder of a corpus whose tokenizer to keep")
    parser.add_argument(
        "--shares", nargs="+", metavar="TASK=SHARE", help="other shares of the training tasks"
    )
    args = parser.parse_args()
    shares = None
    if args.shares:
        shares = {name: float(x) for name, _, x in (s.partition("=") for s in args.shares)}
        if unknown := shares.keys() - nano_tasks.TASKS.keys():
            parser.error(f"no task {sorted(unknown)}; there are {sorted(nano_tasks.TASKS)}")
    corpus = build(
        vocab_size=args.vocab, conversations=args.conversations, shares=shares,
        tokenizer=Corpus.load(args.tokenizer).tokenizer if args.tokenizer else None,
    )  # fmt: skip
    corpus.save(args.folder)
    for name, stream in corpus.streams.items():
        print(f"{name:10} {len(stream.starts):8,} documents {len(stream.ids):12,} tokens")
    print(f"held-out text: {corpus.held_bytes:,} bytes")


if __name__ == "__main__":
    main()
