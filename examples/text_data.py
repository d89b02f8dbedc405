"""Real text as a dataset: where it is found, how it is cut into training and validation, and how it is read.

Looked for in this order, and said which was taken: the path that was given; the documentation of Python
(Debian's ``python3-doc``); the source of Python's standard library, which is always there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizer
import torch
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


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Some text: where it is from, and its documents in a fixed, mixed order."""

    source: str
    documents: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Text as tokens."""

    source: str
    num_bytes: int
    tokenizer: Tokenizer
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
            files = sorted(p for p in library.rglob("*.py") if not _LEFT_OUT & set(p.parts))
            source = f"the source of Python's standard library ({library})"
    documents = tuple(_read(_mixed(files), max_bytes))
    if not documents:
        raise SystemExit(
            f"No text in {source}. --data takes a text file, or a folder with {', '.join(_SUFFIXES)}."
        )
    return Corpus(source=source, documents=documents)


def load_text(
    path: str | None, *, vocab_size: int, seq_length: int, max_bytes: int, cache_dir: Path
) -> TextData:
    """Find text, train the tokenizer on part of it, encode it; the result is kept in ``cache_dir``."""
    corpus = find_corpus(path, max_bytes)
    text = "\n\n".join(corpus.documents)
    key = hashlib.sha256(f"{vocab_size} {text}".encode()).hexdigest()[:16]
    cached = cache_dir / f"tokens-{key}.npz"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first worker of a machine does it for all
        if not cached.exists():
            _save_encoded(cached, text, vocab_size)
    with np.load(cached) as arrays:  # plain arrays: numpy's default refuses pickles
        words = Tokenizer(arrays["merges"].tolist())
        tokens = arrays["tokens"]
    border = max(seq_length + 1, len(tokens) // 20)  # the last twentieth is for validation
    return TextData(
        source=corpus.source,
        num_bytes=len(text.encode()),
        tokenizer=words,
        train=TokenBlocks(tokens[:-border], seq_length),
        validation=TokenBlocks(tokens[-border:], seq_length),
    )


def _save_encoded(target: Path, text: str, vocab_size: int) -> None:
    """Under another name first, so that a file with this name is always whole."""
    words = tokenizer.train(text[:_TOKENIZER_BYTES], vocab_size)
    with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
        np.savez(file, merges=np.array(words.merges, dtype=np.int32), tokens=words.encode(text))
    os.replace(file.name, target)


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
