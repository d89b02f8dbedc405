"""A flipped byte, a file cut short, a file that is gone: named with what was expected and found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from tests.checkpoint.state import save, train, trained
from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint
from varuna.checkpoint.find import Checkpoint, find_checkpoint, with_newest
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.store import open_store
from varuna.checkpoint.verify import problems_of
from varuna.cli.checkpoint import checkpoint as command
from varuna.events import Notice


@pytest.fixture
def two(tmp_path) -> Path:
    """A directory with checkpoints of steps 1 and 2."""
    state = trained(1)
    store = open_store(str(tmp_path))
    save(store, state, 2, 1)
    train(state, 1)
    save(store, state, 2, 1)
    return tmp_path


def newest_files(root: Path) -> list[Path]:
    directory = max(root.iterdir(), key=lambda path: path.name)
    return sorted(directory.iterdir())


def read_all(checkpoint: Checkpoint) -> tuple[int, dict[str, torch.Tensor]]:
    return checkpoint.step, read_tensors(checkpoint, checkpoint.places)


def flip(path: Path, position: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def assert_older_is_taken(root: Path, *texts: str) -> None:
    """The newest is asked for: the older one, with a notice. An explicit step: an error. ``verify``: exit 1."""
    store = open_store(str(root))
    events: list[Notice] = []
    found = with_newest(store, read_all, publish=events.append)
    assert found is not None
    assert found[0] == 1
    assert len(events) == 1
    with pytest.raises(DamagedCheckpoint) as raised:
        with_newest(store, read_all, step=2, publish=lambda event: pytest.fail(str(event)))
    for text in texts:
        assert text in events[0].text
        assert text in str(raised.value)
    verified = CliRunner().invoke(command, ["verify", str(root)])
    assert verified.exit_code == 1
    assert texts[0] in verified.output
    older = CliRunner().invoke(command, ["verify", str(root), "--step", "1"])
    assert older.exit_code == 0, older.output
    assert ": ok (" in older.output


def test_a_flipped_byte_in_a_tensor(two):
    part = next(path for path in newest_files(two) if path.name.startswith("section-00001"))
    flip(part, part.stat().st_size - 5)
    assert_older_is_taken(two, str(part), "expected crc32", "found")


def test_every_flipped_bit_of_a_part_is_found_by_verify(two):
    store = open_store(str(two))
    found = find_checkpoint(store, publish=lambda event: pytest.fail(str(event)))
    assert found is not None
    part = next(path for path in newest_files(two) if path.name.startswith("section-00002"))
    before = part.read_bytes()
    for position in range(0, len(before), max(1, len(before) // 97)):
        flip(part, position, position % 8)
        problems = list(problems_of(found))
        assert len(problems) == 1, (position, problems)
        assert str(part) in problems[0]
        part.write_bytes(before)
    assert list(problems_of(found)) == []


def test_a_part_cut_short(two):
    part = next(path for path in newest_files(two) if path.name.startswith("section-00000"))
    size_bytes = part.stat().st_size
    cut(part)
    assert_older_is_taken(two, str(part), f"expected {size_bytes} bytes", f"found {size_bytes - 7}")


def test_a_part_that_is_gone(two):
    part = next(path for path in newest_files(two) if path.name.startswith("section-00003"))
    part.unlink()
    assert_older_is_taken(two, str(part), "found no such file")


@pytest.mark.parametrize("position", [0, 5, 30, 60, 300, 2000, -40, -1])
def test_a_flipped_byte_in_the_manifest(two, position):
    manifest = next(path for path in newest_files(two) if path.name == "manifest.json")
    flip(manifest, position % manifest.stat().st_size, 0)
    assert_older_is_taken(two, str(manifest))


def test_another_format_is_refused_and_not_taken_for_damage(two):
    manifest = next(path for path in newest_files(two) if path.name == "manifest.json")
    manifest.write_bytes(manifest.read_bytes().replace(b'{"format":1,', b'{"format":2,', 1))
    with pytest.raises(CheckpointError, match="has format 2; this Varuna reads 1"):
        with_newest(open_store(str(two)), read_all, publish=lambda event: pytest.fail(str(event)))


def test_a_manifest_cut_short_or_without_its_last_step(two):
    manifest = next(path for path in newest_files(two) if path.name == "manifest.json")
    cut(manifest)
    assert_older_is_taken(two, str(manifest), "expected a manifest, found")


def test_a_manifest_in_another_directory_is_not_taken(two):
    manifest = next(path for path in newest_files(two) if path.name == "manifest.json")
    older = next(path for path in two.iterdir() if path != manifest.parent)
    (older / "manifest.json").rename(manifest)
    store = open_store(str(two))
    with pytest.raises(CheckpointError, match=r"expected the manifest of \S+, found that of"):
        find_checkpoint(store, publish=lambda event: None)


def test_a_part_damaged_after_the_checkpoint_was_found_makes_the_reader_go_back(two):
    store = open_store(str(two))
    events: list[Notice] = []

    def use(checkpoint: Checkpoint) -> int:
        if checkpoint.step == 2:
            for path in newest_files(two):
                if path.name.startswith("section-00002"):
                    path.unlink()
        return read_all(checkpoint)[0]

    assert with_newest(store, use, publish=events.append) == 1
    assert "found no such file" in events[0].text


def test_when_all_are_damaged_nothing_starts_from_scratch_in_silence(two):
    for path in two.glob("*/section-00000*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="None of the 2 checkpoints in"):
        find_checkpoint(open_store(str(two)), publish=lambda event: None)


def test_no_checkpoint_at_all_is_none_and_a_missing_step_says_which_there_are(tmp_path, two):
    assert find_checkpoint(open_store(str(tmp_path / "nowhere")), publish=lambda event: None) is None
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7 .*; of these steps: 1, 2"):
        find_checkpoint(open_store(str(two)), 7, publish=lambda event: None)


def test_a_store_that_cannot_be_read_is_an_error_and_not_an_older_checkpoint(two):
    from varuna.checkpoint.store_file import FileStore

    class Unreachable(FileStore):
        def read_into(self, path, spans):
            raise PermissionError(13, "Permission denied")

    with pytest.raises(CheckpointError, match=r"Cannot read .*Permission denied"):
        with_newest(Unreachable(two), read_all, publish=lambda event: pytest.fail(str(event)))
