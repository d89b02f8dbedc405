"""Data of the other examples: images in IDX files, and pairs of sentences with masked words."""

from __future__ import annotations

import gzip
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", autouse=True)
def _examples_on_path() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLES))
    yield
    sys.path.remove(str(EXAMPLES))


def write_idx(path: Path, values: np.ndarray) -> None:
    sizes = np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()))


def test_images_and_their_mirror_images(tmp_path: Path) -> None:
    from fashion import DEVIATION, MEAN, Images

    pixels = np.arange(3 * 28 * 28, dtype=np.uint8).reshape(3, 28, 28)
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.array([7, 0, 9], dtype=np.uint8))
    images = Images(tmp_path, "train", mirrored=True)
    assert len(images) == 6
    image, label = images[2]
    mirrored, same_label = images[5]
    assert label == same_label == 9
    assert image.shape == (1, 28, 28)
    assert torch.allclose(image * DEVIATION + MEAN, torch.tensor(pixels[2] / 255.0).float()[None])
    assert torch.equal(mirrored, image.flip(-1))
    assert [labels.tolist() for _, labels in images.batches(2)] == [[7, 0], [9]]


def test_what_is_no_image_file_is_told(tmp_path: Path) -> None:
    from fashion import read_idx

    with pytest.raises(SystemExit, match=r"x\.gz is not there\. Install Debian's dataset-fashion-mnist"):
        read_idx(tmp_path / "x.gz")
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"\0\0\x0d\1\0\0\0\0"))
    with pytest.raises(SystemExit, match="no IDX file of bytes"):
        read_idx(tmp_path / "x.gz")


def test_pairs_follow_each_other_or_not_and_have_masked_words(tmp_path: Path) -> None:
    from bert import CLS, MASK, PAD, SEP, Pairs, Sentences, prepare
    from text_data import find_prose

    lines = [f"The word number {n} comes first. Then another sentence {n} follows it." for n in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    prepare(tmp_path / "made", find_prose(tmp_path / "text.txt"), 300)
    text = Sentences.load(tmp_path / "made")
    assert len(text.firsts) == 200
    args = Namespace(seq_length=24, masked=3)
    pairs = Pairs(text, range(200), args, 300, num_copies=2)
    assert len(pairs) == 400
    num_others = num_masks = 0
    for index in range(400):
        pair = pairs[index]
        tokens, labels = pair["input_ids"], pair["labels"]
        assert all(torch.equal(pair[name], value) for name, value in pairs[index].items())
        assert tokens.shape == labels.shape == (24,)
        assert int((labels != -100).sum()) == 3
        assert tokens[0] == CLS
        assert int((tokens == SEP).sum()) == 2
        assert torch.equal(tokens == PAD, pair["attention_mask"] == 0)
        whole = torch.where(labels != -100, labels, tokens)
        ends = (whole == SEP).nonzero().flatten().tolist()
        assert pair["token_type_ids"].nonzero().flatten().tolist() == list(range(ends[0] + 1, ends[1] + 1))
        first = int(text.firsts[index % 200])
        assert whole[1 : ends[0]].tolist() == text.sentence(first)[: ends[0] - 1].tolist()
        follows = (
            whole[ends[0] + 1 : ends[1]].tolist() == text.sentence(first + 1)[: ends[1] - ends[0] - 1].tolist()
        )
        assert follows or pair["next_sentence_label"] == 1
        num_others += int(pair["next_sentence_label"])
        num_masks += int((tokens == MASK).sum())
    assert 160 < num_others < 240
    assert 900 < num_masks < 1020  # four fifths of 1,200


def test_prose_is_always_there(tmp_path: Path) -> None:
    from text_data import find_prose

    first = next(texts for texts in find_prose(None).paragraphs if len(texts) > 1)
    assert all(text.strip() for text in first)
    with pytest.raises(SystemExit, match="must be a text file"):
        find_prose(tmp_path / "nowhere.txt")
