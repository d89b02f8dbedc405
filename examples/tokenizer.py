"""Byte pair encoding, small enough to read and to train in a second: bytes, then pairs that occur often.

Text is cut into words first (a word takes the space before it), and pairs are joined inside words only. Any
text can be encoded, since the first 256 tokens are the bytes; decoding gives it back exactly.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import numpy as np

_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?[^\s\w]+|_+|\s+")

Pair = tuple[int, int]


class Tokenizer:
    """Text to token ids and back, by a list of merges: merge i makes token ``256 + i`` of two earlier ones."""

    def __init__(self, merges: Iterable[Pair]) -> None:
        self.merges = [(int(left), int(right)) for left, right in merges]
        self._rank = {pair: index for index, pair in enumerate(self.merges)}
        self._bytes = [bytes([value]) for value in range(256)]
        for left, right in self.merges:
            self._bytes.append(self._bytes[left] + self._bytes[right])
        self._encode_word = lru_cache(maxsize=None)(self._merge_word)

    @property
    def vocab_size(self) -> int:
        """Number of different tokens."""
        return 256 + len(self.merges)

    def encode(self, text: str) -> np.ndarray:
        """Token ids; int16, shape (num_tokens,)."""
        ids: list[int] = []
        for word in _WORD.findall(text):
            ids += self._encode_word(word)
        return np.array(ids, dtype=np.int16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text; what is no text becomes a replacement character."""
        return b"".join(self._bytes[int(token)] for token in ids).decode("utf-8", errors="replace")

    def num_bytes(self, ids: np.ndarray) -> int:
        """Bytes of the text behind some ids, for losses per byte."""
        lengths = np.array([len(text) for text in self._bytes])
        return int(lengths[ids].sum())

    def _merge_word(self, word: str) -> list[int]:
        tokens = list(word.encode())
        while len(tokens) > 1:
            pair = min(pairwise(tokens), key=lambda p: self._rank.get(p, len(self.merges)))
            if pair not in self._rank:
                break
            tokens = join(tokens, pair, 256 + self._rank[pair])
        return tokens


def train(text: str, vocab_size: int) -> Tokenizer:
    """Join the pair that occurs most, again and again, until there are ``vocab_size`` tokens."""
    counts = Counter(_WORD.findall(text))
    words = [list(word.encode()) for word in counts]
    weights = list(counts.values())
    pair_counts: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, tokens in enumerate(words):
        for pair in pairwise(tokens):
            pair_counts[pair] += weights[index]
            places[pair].add(index)
    merges: list[Pair] = []
    while 256 + len(merges) < vocab_size and pair_counts:
        best = max(pair_counts, key=lambda pair: (pair_counts[pair], pair))
        if pair_counts[best] < 2:
            break
        for index in places.pop(best):
            old = words[index]
            words[index] = new = join(old, best, 256 + len(merges))
            for pair in pairwise(old):
                pair_counts[pair] -= weights[index]
            for pair in pairwise(new):
                pair_counts[pair] += weights[index]
                places[pair].add(index)
        del pair_counts[best]
        merges.append(best)
    return Tokenizer(merges)


def join(tokens: list[int], pair: Pair, joined: int) -> list[int]:
    """The tokens with every occurrence of ``pair`` replaced, from the left."""
    result: list[int] = []
    index = 0
    while index < len(tokens):
        if index + 1 < len(tokens) and (tokens[index], tokens[index + 1]) == pair:
            result.append(joined)
            index += 2
        else:
            result.append(tokens[index])
            index += 1
    return result
