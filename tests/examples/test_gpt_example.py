"""The example's own parts: tokens go back to text, text is found in the stated order, the model learns."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _examples_on_path():
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


@given(text=st.text(max_size=200))
@settings(max_examples=50, deadline=None)
def test_tokens_give_the_text_back(text):
    import tokenizer

    words = tokenizer.train("the cat sat on the mat, the cat sat_on _the_ mat 123 123\n" * 3, 300)
    assert words.vocab_size > 256
    assert words.decode(words.encode(text)) == text
    assert words.num_bytes(words.encode(text)) == len(text.encode())


def test_what_occurs_often_becomes_one_token():
    import tokenizer

    words = tokenizer.train("the cat and the dog and the bird\n" * 5, 275)
    assert len(words.encode("the the the")) <= 4
    assert len(words.encode("xyz")) == 3


def test_text_is_taken_from_the_path_and_cached(tmp_path):
    import text_data

    (tmp_path / "books").mkdir()
    for name in ("a.txt", "b.md", "c.bin"):
        (tmp_path / "books" / name).write_text(f"{name} says the same thing again and again. " * 200)
    options = {"vocab_size": 300, "seq_length": 16, "max_bytes": 10**6, "cache_dir": tmp_path / "cache"}
    data = text_data.load_text(str(tmp_path / "books"), **options)
    assert data.source == str(tmp_path / "books")
    tokens, targets = data.train[3]
    assert tokens.shape == targets.shape == (16,)
    assert torch.equal(tokens[1:], targets[:-1])
    whole = data.tokenizer.decode(np.concatenate([data.train._tokens, data.validation._tokens]))
    assert "a.txt says" in whole
    assert "b.md says" in whole
    assert "c.bin" not in whole
    cached = list((tmp_path / "cache").glob("tokens-*.npz"))
    assert len(cached) == 1
    again = text_data.load_text(str(tmp_path / "books"), **options)
    assert torch.equal(again.train[3][0], tokens)


def test_without_a_path_there_is_always_text(tmp_path):
    import text_data

    corpus = text_data.find_corpus(None, 100_000)
    assert "Python" in corpus.source
    assert 50_000 < sum(map(len, corpus.documents)) <= 100_000
    with pytest.raises(SystemExit, match="No text in"):
        text_data.find_corpus(str(tmp_path), 1000)
    with pytest.raises(SystemExit, match="no such file"):
        text_data.find_corpus(str(tmp_path / "nowhere"), 1000)


def test_the_model_learns_a_line_and_has_ten_million_parameters_by_default():
    from gpt_model import GPT, GPTConfig

    assert 9e6 < sum(parameter.numel() for parameter in GPT(GPTConfig()).parameters()) < 11e6
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=20, seq_length=12, num_layers=2, width=32, num_heads=2))
    line = torch.arange(13)[None].repeat(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(line[:, :-1], line[:, 1:]).item()
    for _ in range(40):
        loss = model(line[:, :-1], line[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1 < first
    written = model.eval().generate(line[:1, :3], 6, temperature=1.0, top_k=1, seed=0)
    assert written.tolist() == [list(range(9))]
