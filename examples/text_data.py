"""Real text as a dataset: where it is found, how it is cut into training and validation, and how it is read.

Looked for in this order, and said which was taken: the path that was given; the documentation of Python
(Debian's ``python3-doc``); the source of Python's standard library, which is always there. A path to an
``.npy`` file is token ids that were made before, by any tokenizer; it is read as samples ask for it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizer
import torch
from common import made_once
from tokenizer import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

_SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".c", ".h", ".rs", ".json")
_LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "lib2to3",
    "pydoc_data",
}  # tables and lists
_TOKENIZER_BYTES = 500_000  # of text from which the tokenizer is trained
_MOST_TOKENS = 16_384  # int16 holds them
_WORDNET = Path("/usr/share/wordnet")  # Debian's wordnet-base


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Some text: where it is from, and its documents in a fixed, mixed order."""

    source: str
    documents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text as tokens.

    Attributes:
        source: where it is from.
        num_bytes: of all text.
        tokenizer: back to text; None if the tokens were made before.
        train: samples to train on.
        validation: others, from the end.
    """

    source: str
    num_bytes: int
    tokenizer: Tokenizer | None
    train: TokenBlocks
    validation: TokenBlocks


class TokenBlocks(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is tokens ``[i·T, (i+1)·T)`` and, as targets, the same shifted by one."""

    def __init__(self, tokens: np.ndarray, seq_length: int) -> None:
        self._tokens = tokens
        self._seq_length = seq_length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq_length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._seq_length
        block = self._tokens[start : start + self._seq_length + 1]
        tokens = torch.from_numpy(block.astype(np.int64))
        return tokens[:-1], tokens[1:]

    @property
    def tokens(self) -> np.ndarray:
        """All tokens that samples use."""
        return self._tokens[: len(self) * self._seq_length + 1]


def find_corpus(path: str | None, max_bytes: int) -> Corpus:
    """Text of at most ``max_bytes``, whole documents.

    Raises:
        SystemExit: nothing readable at ``path``.
    """
    if path is not None:
        given = Path(path).expanduser()
        if not given.exists():
            raise SystemExit(f"--data {path}: there is no such file or folder.")
        files = sorted(p for p in given.rglob("*") if p.suffix in _SUFFIXES) if given.is_dir() else [given]
        source = str(given)
    else:
        files = sorted(Path("/usr/share/doc").glob("python3*/html/_sources/**/*.rst.txt"))
        source = "the Python documentation (python3-doc)"
        if not files:
            library = Path(sysconfig.get_path("stdlib"))
            files = sorted(_modules(library))
            source = f"the source of Python's standard library ({library})"
    documents = tuple(_read(_mixed(files), max_bytes))
    if not documents:
        raise SystemExit(
            f"No text in {source}. --data takes a text file, or a folder with {', '.join(_SUFFIXES)}."
        )
    return Corpus(source=source, documents=documents)


def _modules(folder: Path) -> Iterator[Path]:
    """Python files in and below a folder; folders that are left out are not even looked into."""
    for inside, below, names in os.walk(folder):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        yield from (Path(inside, name) for name in names if name.endswith(".py"))


def load_text(
    path: str | None, *, vocab_size: int, seq_length: int, max_bytes: int, cache_dir: Path
) -> TextData:
    """Find text, train the tokenizer on part of it, encode it; the result is kept in ``cache_dir``.

    Args:
        path: as the user gave it.
        vocab_size: rows of the model's embedding. Of text at most 16,384 are used: more need more text.
        seq_length: T, tokens of a sample.
        max_bytes: take no more text.
        cache_dir: what is made once is kept here.

    Raises:
        SystemExit: there is no such text, or its tokens are not for such a model.
    """
    if path is not None and path.endswith(".npy"):
        return _read_tokens(path, vocab_size, seq_length)
    corpus = find_corpus(path, max_bytes)
    text = "\n\n".join(corpus.documents)
    key = hashlib.sha256(f"{vocab_size} {text}".encode()).hexdigest()[:16]
    cached = cache_dir / f"tokens-{key}.npz"
    made_once(cached, lambda file: _save_encoded(file, text, min(vocab_size, _MOST_TOKENS)))
    with np.load(cached) as arrays:  # plain arrays: numpy's default refuses pickles
        words = Tokenizer(arrays["merges"].tolist())
        tokens = arrays["tokens"]
    return _divided(corpus.source, len(text.encode()), words, tokens, seq_length)


def _read_tokens(path: str, vocab_size: int, seq_length: int) -> TextData:
    """Token ids of a file, which stays where it is."""
    if not Path(path).exists():
        raise SystemExit(f"--data {path}: there is no such file.")
    tokens = np.load(path, mmap_mode="r")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) < 40 * (seq_length + 1):
        raise SystemExit(
            f"--data {path}: {tokens.dtype} of shape {tokens.shape}. It must be one row of integers, "
            f"at least {40 * (seq_length + 1)} of them for sequences of {seq_length}."
        )
    highest = int(tokens.max())
    if highest >= vocab_size:
        raise SystemExit(f"--data {path} has token {highest}. Say --vocab-size {highest + 1} or more.")
    return _divided(path, tokens.nbytes, None, tokens, seq_length)


def _divided(
    source: str, num_bytes: int, words: Tokenizer | None, tokens: np.ndarray, seq_length: int
) -> TextData:
    border = max(seq_length + 1, len(tokens) // 20)  # the last twentieth is for validation
    return TextData(
        source=source,
        num_bytes=num_bytes,
        tokenizer=words,
        train=TokenBlocks(tokens[:-border], seq_length),
        validation=TokenBlocks(tokens[-border:], seq_length),
    )


def _save_encoded(target: Path, text: str, vocab_size: int) -> None:
    words = tokenizer.train(text[:_TOKENIZER_BYTES], vocab_size)
    with target.open("wb") as file:
        np.savez(file, merges=np.array(words.merges, dtype=np.int32), tokens=words.encode(text))


def _mixed(files: Sequence[Path]) -> list[Path]:
    """In an order that has nothing to do with the names' alphabet, the same everywhere."""
    return sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())


def _read(files: Sequence[Path], max_bytes: int) -> list[str]:
    documents, num_bytes = [], 0
    for file in files:
        document = file.read_text(encoding="utf-8", errors="replace")
        if num_bytes + len(document) > max_bytes and documents:
            continue
        documents.append(document[:max_bytes])
        num_bytes += len(document)
        if num_bytes >= 0.98 * max_bytes:
            break
    return documents


# --- prose ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prose:
    """Sentences: where they are from, and paragraph by paragraph."""

    source: str
    paragraphs: Iterator[list[str]]


def find_prose(path: Path | None) -> Prose:
    """Sentences of the path that was given; of WordNet; or of the source of Python's standard library.

    Raises:
        SystemExit: there is nothing at ``path``.
    """
    if path is not None:
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise SystemExit(f"--data {path}: it must be a text file, or a folder with .txt files.")
        return Prose(source=str(path), paragraphs=_paragraphs_of(files))
    if _WORDNET.is_dir():
        return Prose(source=f"WordNet ({_WORDNET})", paragraphs=_glosses())
    library = Path(sysconfig.get_path("stdlib"))
    return Prose(source=f"the docstrings of Python's standard library ({library})", paragraphs=_docs(library))


def _paragraphs_of(files: Sequence[Path]) -> Iterator[list[str]]:
    for file in files:
        yield from map(_sentences, file.read_text(encoding="utf-8", errors="replace").split("\n\n"))


def _glosses() -> Iterator[list[str]]:
    """What each word means, and examples of its use: behind `` | ``, parted by semicolons."""
    for kind in ("noun", "verb", "adj", "adv"):
        for line in (_WORDNET / f"data.{kind}").read_text(encoding="latin-1").splitlines():
            if not line.startswith(" "):  # the licence
                yield [part.strip(' "') for part in line.partition(" | ")[2].split(";")]


def _docs(library: Path) -> Iterator[list[str]]:
    for file in sorted(library.rglob("[a-z]*.py")):
        if not _LEFT_OUT & set(file.parts):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    yield from map(_sentences, (ast.get_docstring(node) or "").split("\n\n"))


def _sentences(paragraph: str) -> list[str]:
    """Cut after what ends a sentence, before a capital letter."""
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split()))
