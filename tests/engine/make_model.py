"""Writes a tiny language model with random weights, as a GGUF file for llama.cpp.

The model generates varied text of words and of characters that have several bytes, and it ends the text
sometimes. The next token depends on all tokens before it, so text that is continued at a wrong place soon
differs. Many characters consist of several tokens, like rare characters in real models, so a limit of tokens
can cut a character.

    python -m tests.engine.make_model model.gguf bpe
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from gguf import GGUFWriter, TokenType
from gguf.vocab import bytes_to_unicode
from numpy.typing import NDArray

TokenizerKind = Literal["bpe", "spm", "bytes"]
"""`bpe` is byte-level BPE like that of GPT-2, Llama 3 and Qwen. `spm` is SentencePiece like that of Llama 2
and Mistral. `bytes` has one token per byte.

The model may spell "the" with the tokens "t" and "he", but the tokenizer returns one token for it. Only with
one token per byte does the tokenizer always return the tokens that were generated.
"""
TOKENIZER_KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)

CONTEXT_LENGTH = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_WORDS = ["the", "of", "and", "in", "to", "ing", "tion", "er", "on", "re", "he", "an", "at", "is", "it", "es"]
_CHARACTERS = ["é", "ö", "€", "漢", "漢字", "✅", "😊", "👩", "\u200d", "e\u0301", "\u2028", "\n\n"]
PIECES = [piece.encode() for piece in [*_WORDS, *(f" {word}" for word in _WORDS), *_CHARACTERS]]
"""Tokens of more than one byte."""
PARTS = [b"\xe6\xbc", b"\xf0\x9f", b" \xc3", b"\xa9s", b"\xbc\xa2", b"\x98\x8a", b"\x80\x8d\xf0\x9f"]
"""Tokens that begin or end inside a character. Only BPE has such tokens."""
MALFORMED = b"\xff"
"""A byte that is never part of UTF-8. Real models generate malformed text too, though rarely."""
END_OF_TEXT = "<|im_end|>"

_LAYERS = 2
_HEADS = 4
_EMBEDDING_LENGTH = _HEADS * 18
_FEED_FORWARD_LENGTH = 128
_END_OF_TEXT_SCALE = {"bpe": 1.05, "spm": 0.95, "bytes": 1.0}
"""Length of the end token's vector, relative to others. A third of the texts end within 100 tokens."""
_MALFORMED_SCALE = 0.85
"""The same for the malformed byte. One text in six contains it."""


class Next(IntEnum):
    """Kind of byte that follows in UTF-8 text, as far as one byte shows it."""

    CHARACTER = 0
    LAST_BYTE = 1
    MIDDLE_BYTE_OF_3 = 2
    SECOND_BYTE_OF_4 = 3
    THIRD_BYTE_OF_4 = 4
    NEVER = 5
    """A byte that follows nothing is not generated."""


_UNUSED = (Next.NEVER, Next.CHARACTER)
_GROUPS = {
    bytes([*b"\t\n", *range(0x20, 0x7F)]): (Next.CHARACTER, Next.CHARACTER),
    b"\xc3\xcc": (Next.CHARACTER, Next.LAST_BYTE),
    b"\xe2\xe5\xe6": (Next.CHARACTER, Next.MIDDLE_BYTE_OF_3),
    b"\x80\x82\x9c\xad\xbc": (Next.MIDDLE_BYTE_OF_3, Next.LAST_BYTE),
    b"\xf0": (Next.CHARACTER, Next.SECOND_BYTE_OF_4),
    b"\x9f": (Next.SECOND_BYTE_OF_4, Next.THIRD_BYTE_OF_4),
    b"\x91\x98": (Next.THIRD_BYTE_OF_4, Next.LAST_BYTE),
    b"\x81\x83\x85\x8a\x8d\x8e\x97\xa0\xa2\xa4\xa8\xa9\xac\xb6": (Next.LAST_BYTE, Next.CHARACTER),
    MALFORMED: (Next.CHARACTER, Next.CHARACTER),
}
# No byte is in two groups, so the last byte alone shows what follows: more is hard to express in weights
# without training.
TRANSITIONS = {byte: transition for group, transition in _GROUPS.items() for byte in group}
"""For each byte that the model generates: what the byte is, and what follows it."""


class Token(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    kind: TokenType
    data: bytes = b""
    """The bytes that the token stands for; none if it is a control token."""
    generated: bool = True

    def find_transition(self) -> tuple[Next, Next]:
        """Return what the token is in the text before it, and what follows it."""
        if self.text == END_OF_TEXT:
            return Next.CHARACTER, Next.CHARACTER
        if not self.data or not self.generated:
            return _UNUSED
        transitions = [TRANSITIONS.get(byte, _UNUSED) for byte in self.data]
        if Next.NEVER in (before for before, _ in transitions):
            return _UNUSED
        if any(left[1] != right[0] for left, right in pairwise(transitions)):
            raise ValueError(f"the bytes of {self.data!r} do not follow each other in TRANSITIONS")
        return transitions[0][0], transitions[-1][1]


def list_bpe_tokens(pieces: Iterable[bytes]) -> tuple[list[Token], list[str]]:
    """Return a vocabulary of all bytes and of these pieces, and the merges that make the pieces."""
    letters = bytes_to_unicode()

    def spell(data: bytes) -> str:
        return "".join(letters[byte] for byte in data)

    tokens = [Token(text, TokenType.CONTROL) for text in ("<|endoftext|>", "<|im_start|>", END_OF_TEXT)]
    tokens += [Token(letters[byte], TokenType.NORMAL, bytes([byte])) for byte in range(256)]
    known, merges = {token.data for token in tokens}, []
    for piece in pieces:
        for end in range(2, len(piece) + 1):
            data = piece[:end]
            if data not in known:
                known.add(data)
                tokens.append(Token(spell(data), TokenType.NORMAL, data))
                merges.append(f"{spell(data[:-1])} {spell(data[-1:])}")
    return tokens, merges


def list_spm_tokens() -> list[Token]:
    """Return the vocabulary: pieces of whole characters, and a token for each byte."""
    tokens = [Token("<unk>", TokenType.UNKNOWN)]
    tokens += [Token(text, TokenType.CONTROL) for text in ("<s>", "</s>", "<|im_start|>", END_OF_TEXT)]
    printable = range(0x20, 0x7F)  # These bytes are pieces as well, which a real model prefers.
    tokens += [
        Token(f"<0x{byte:02X}>", TokenType.BYTE, bytes([byte]), generated=byte not in printable)
        for byte in range(256)
    ]
    pieces = dict.fromkeys([*PIECES, *(bytes([byte]) for byte in printable)])
    return tokens + [Token(piece.decode().replace(" ", "▁"), TokenType.NORMAL, piece) for piece in pieces]


def make_weights(tokens: Sequence[Token], kind: TokenizerKind) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield all tensors of the model by name.

    The first dimensions of the embedding say what follows the token (`Next`). The layers leave them
    unchanged, and the output rejects tokens that do not follow. All other weights are random. Attention is
    sharp, so that the next token depends on distant tokens too.
    """
    # The legacy generator: NumPy never changes its numbers.
    random = np.random.RandomState(1)
    kinds = len(Next)

    def draw(rows: int, columns: int, scale: float) -> NDArray[np.float32]:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    def draw_input(rows: int, scale: float = 1.0) -> NDArray[np.float32]:
        weights = draw(rows, _EMBEDDING_LENGTH, scale / _EMBEDDING_LENGTH**0.5)
        weights[:, :kinds] = 0
        return weights

    def draw_output(columns: int, scale: float) -> NDArray[np.float32]:
        weights = draw(_EMBEDDING_LENGTH, columns, scale / columns**0.5)
        weights[:kinds] = 0
        return weights

    embedding = draw(len(tokens), _EMBEDDING_LENGTH, 1)
    output = draw(len(tokens), _EMBEDDING_LENGTH, 1)
    embedding[:, :kinds], output[:, :kinds] = 0, -40
    for row, token in enumerate(tokens):
        before, after = token.find_transition()
        embedding[row, after] = 8
        if before is not Next.NEVER:
            output[row, before] = 0
        if token.text == END_OF_TEXT:
            output[row, kinds:] *= _END_OF_TEXT_SCALE[kind]
        elif token.data == MALFORMED:
            output[row, kinds:] *= _MALFORMED_SCALE
    ones = np.ones(_EMBEDDING_LENGTH, np.float32)
    yield "token_embd", embedding
    yield "output", output
    yield "output_norm", ones
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}"
        yield f"{prefix}.attn_norm", ones
        yield f"{prefix}.attn_q", draw_input(_EMBEDDING_LENGTH, 6)
        yield f"{prefix}.attn_k", draw_input(_EMBEDDING_LENGTH, 6)
        yield f"{prefix}.attn_v", draw_input(_EMBEDDING_LENGTH)
        yield f"{prefix}.attn_output", draw_output(_EMBEDDING_LENGTH, 2)
        yield f"{prefix}.ffn_norm", ones
        yield f"{prefix}.ffn_gate", draw_input(_FEED_FORWARD_LENGTH)
        yield f"{prefix}.ffn_up", draw_input(_FEED_FORWARD_LENGTH)
        yield f"{prefix}.ffn_down", draw_output(_FEED_FORWARD_LENGTH, 2)


def add_tokenizer(writer: GGUFWriter, kind: TokenizerKind) -> list[Token]:
    """Add the tokenizer to a file, and return its vocabulary."""
    if kind == "spm":
        tokens = list_spm_tokens()
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(
            [-float(place) for place in range(len(tokens))]
        )  # Earlier pieces merge first.
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    else:
        # The file must contain a merge. The control characters 0 and 1 are never generated.
        tokens, merges = list_bpe_tokens([*PIECES, *PARTS] if kind == "bpe" else [b"\x00\x01"])
        if kind == "bytes":  # Text cannot carry a malformed byte to the next slice.
            tokens = [token._replace(generated=token.data != MALFORMED) for token in tokens]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges(merges)
        writer.add_add_bos_token(False)
    ids = {token.text: place for place, token in enumerate(tokens)}
    writer.add_token_list([token.text for token in tokens])
    writer.add_token_types([token.kind for token in tokens])
    writer.add_bos_token_id(ids.get("<s>", 0))
    writer.add_eos_token_id(ids[END_OF_TEXT])
    writer.add_chat_template(CHAT_TEMPLATE)
    return tokens


def write_model(path: Path, kind: TokenizerKind) -> None:
    """Write the model with a tokenizer of this kind. Its bytes are always the same."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT_LENGTH)
    writer.add_embedding_length(_EMBEDDING_LENGTH)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FEED_FORWARD_LENGTH)
    writer.add_head_count(_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_EMBEDDING_LENGTH // _HEADS)
    tokens = add_tokenizer(writer, kind)
    for name, weights in make_weights(tokens, kind):
        writer.add_tensor(f"{name}.weight", weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    target, wanted = sys.argv[1:]
    if wanted not in TOKENIZER_KINDS:
        sys.exit(f"no tokenizer {wanted!r}; choose from {', '.join(TOKENIZER_KINDS)}")
    write_model(Path(target), wanted)
