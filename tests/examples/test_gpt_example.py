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


def options(monkeypatch, *words):
    import gpt_options

    monkeypatch.setattr(sys, "argv", ["gpt.py", *words])
    return gpt_options.parse_arguments("A GPT.", save="runs/gpt")


@pytest.mark.parametrize(
    ("size", "billions"),
    [("10m", 0.0093), ("125m", 0.124), ("355m", 0.355), ("1.5b", 1.558), ("2.5b", 2.49), ("8.3b", 8.317)],
)
def test_sizes_have_the_parameters_of_their_names(size, billions, monkeypatch):
    from gpt_model import GPT
    from gpt_options import SIZES, model_config

    from varuna.plan.estimate_models import MODELS

    config = model_config(options(monkeypatch, "--size", size))
    with torch.device("meta"):
        model = GPT(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == config.num_parameters
    assert num_parameters == pytest.approx(billions * 1e9, rel=0.005)
    if (profile := SIZES[size].profile) is not None:
        assert num_parameters == MODELS[profile].num_parameters


def test_the_size_sets_what_is_not_given(monkeypatch):
    args = options(monkeypatch, "--size", "2.5b", "--num-layers", "3", "--fp16", "--lr", "1e-3")
    assert (args.num_layers, args.hidden_size, args.global_batch_size) == (3, 1920, 8192)
    assert (args.precision, args.lr, args.min_lr) == ("fp16", 1e-3, 1e-4)


@pytest.mark.parametrize(
    ("style", "half_way", "end"), [("constant", 1, 1), ("linear", 0.6, 0.2), ("cosine", 0.6, 0.2)]
)
def test_the_learning_rate_goes_up_and_down(style, half_way, end, monkeypatch):
    from gpt_options import lr_share

    words = (
        "--steps",
        "110",
        "--lr-warmup",
        "10",
        "--lr-decay-style",
        style,
        "--lr",
        "1e-3",
        "--min-lr",
        "2e-4",
    )
    args = options(monkeypatch, *words)
    shares = [lr_share(step, args) for step in range(112)]
    assert shares[0] == 0.1
    assert shares[9] == shares[10] == 1
    assert shares[60] == pytest.approx(half_way)
    assert shares[110] == shares[111] == pytest.approx(end)
    assert style != "cosine" or shares[30] > 0.9 - 0.1 * 0.2  # flat at first


def test_a_large_model_is_described_and_its_plan_is_one_command(monkeypatch, capsys):
    import shlex

    from click.testing import CliRunner
    from gpt import main

    from varuna.cli import main as command

    monkeypatch.setattr(sys, "argv", ["gpt.py", "--size", "8.3b", "--describe"])
    main()
    told = capsys.readouterr().out
    assert "8.317 billion parameters: 133.1 GB" in told
    planned = CliRunner().invoke(command, shlex.split(told.split("Ask for a plan: varuna ")[1]))
    assert planned.exit_code == 0, planned.output
    assert "64 of 64 workers" in planned.output


def test_tokens_of_a_file_are_read_as_they_are(tmp_path):
    import text_data

    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(10_000, dtype=np.uint16))
    options = {"seq_length": 16, "max_bytes": 10**6, "cache_dir": tmp_path}
    data = text_data.load_text(str(path), vocab_size=50257, **options)
    tokens, targets = data.train[2]
    assert tokens.tolist() == list(range(32, 48))
    assert targets.tolist() == list(range(33, 49))
    assert data.tokenizer is None
    assert (len(data.train), len(data.validation)) == (593, 31)  # of 9,500 and 500 tokens
    with pytest.raises(SystemExit, match="--vocab-size 10000 or more"):
        text_data.load_text(str(path), vocab_size=300, **options)
    np.save(path, np.zeros((5, 5)))
    with pytest.raises(SystemExit, match=r"float64 of shape \(5, 5\)"):
        text_data.load_text(str(path), vocab_size=300, **options)
    with pytest.raises(SystemExit, match="no such file"):
        text_data.load_text(str(tmp_path / "none.npy"), vocab_size=300, **options)


def test_what_is_made_once_is_whole_or_not_there(tmp_path):
    from common import made_once

    def fails(path):
        path.mkdir()
        (path / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        made_once(tmp_path / "made", fails)
    assert not (tmp_path / "made").exists()
    assert made_once(tmp_path / "made", lambda path: path.write_text("whole")).read_text() == "whole"
    assert made_once(tmp_path / "made", fails).read_text() == "whole"
    assert sorted(file.name for file in tmp_path.iterdir()) == [".lock", "made"]
