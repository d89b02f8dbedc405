"""A job's profile: the same on every worker, kept for the next start, measured anew for another model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.processes import Context, run_workers
from tests.run.test_measure import Tagger, text
from varuna.config import WorldConfig
from varuna.partition import flatten_batch, signature_of
from varuna.plan.costs import section_costs
from varuna.plan.profile_file import encode_profile, read_profile, write_profile
from varuna.run.groups import World, connect
from varuna.run.job import JobSpec
from varuna.run.partitions import PartitionOptions, Partitions
from varuna.run.precision import AutocastSpec, Precision
from varuna.run.profiling import Profiled, ProfileRequest, obtain_profile

CPU = torch.device("cpu")


def alone() -> World:
    return World(rank=0, size=1, store=connect(0, 1, "127.0.0.1", 0, prefix="test", timeout_s=5.0))


def request_of(world: World, directory: Path | None, **changes: Any) -> ProfileRequest:
    torch.manual_seed(0)
    model = changes.pop("model", None) or Tagger()
    precision = changes.pop("precision", Precision.FP32)
    optimizer = changes.pop("optimizer", torch.optim.AdamW)
    autocast = AutocastSpec.of(precision, CPU)
    batch = changes.pop("batch", None) or text(2)
    job = JobSpec(
        dataset=[None] * 4,
        collate_fn=None,
        num_data_workers=None,
        batch_size=4,
        seed=0,
        autocast=autocast,
        loss_weight=None,
        token=b"secret",
    )
    config = WorldConfig(
        rank=world.rank, world_size=world.size, local_rank=world.local_rank, local_world_size=world.size
    )
    plain = ProfileRequest(
        model=model,
        optimizer=optimizer(model.parameters(), lr=0.1),
        precision=precision,
        job=job,
        init_weights=None,
        config=config,
        world=world,
        partitions=Partitions(model, signature_of(batch, 2), PartitionOptions(autocast=autocast), CPU),
        example=flatten_batch(batch).tensors if world.rank == 0 else None,
        directory=directory,
    )
    return replace(plain, **changes)


def profiled(directory: Path | None, **changes: Any) -> Profiled:
    return obtain_profile(request_of(alone(), directory, **changes))


def joint(context: Context, directory: str) -> dict[str, Any]:
    found = obtain_profile(request_of(context.world, Path(directory)))
    return {
        "profile": encode_profile(found.profile).decode(),
        "from_cache": found.from_cache,
        "workers": [machine.num_workers for machine in found.cluster.machines],
        "path": str(found.path),
    }


def test_all_workers_have_the_same_profile_and_the_next_start_has_it_at_once(tmp_path: Path) -> None:
    first = run_workers(3, joint, str(tmp_path))
    assert len({found["profile"] for found in first}) == 1
    assert [found["from_cache"] for found in first] == [False] * 3
    assert first[0]["workers"] == [3]
    (kept,) = tmp_path.iterdir()
    assert first[0]["path"] == str(kept)
    profile = read_profile(kept)
    assert profile.key == kept.stem
    assert profile.within_machine == profile.across_machines
    assert {point.num_workers for point in profile.all_reduce} == {2, 3}
    assert profile.step_overhead_s > 0
    assert any("between machines were not measured" in note for note in profile.notes)
    marked = replace(profile, num_refinements=77)
    write_profile(marked, kept)
    second = run_workers(3, joint, str(tmp_path))
    assert [found["from_cache"] for found in second] == [True] * 3
    assert len({found["profile"] for found in second}) == 1
    assert '"num_refinements":77' in second[0]["profile"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profiled]:
    directory = tmp_path_factory.mktemp("profiles")
    return directory, profiled(directory)


def test_a_profile_says_what_the_model_is(measured: tuple[Path, Profiled]) -> None:
    found = measured[1].profile
    model = Tagger()
    embedding = model.embed.weight
    (tie,) = found.ties
    assert (tie.name, tie.num_bytes, tie.section_indices) == ("embed.weight", embedding.nbytes, (0, 3))
    assert sum(section.parameter_bytes for section in found.sections) == embedding.nbytes + sum(
        p.nbytes for p in model.parameters()
    )
    for section in found.sections:
        assert section.gradient_bytes == section.parameter_bytes
        assert section.optimizer_bytes == pytest.approx(2 * section.parameter_bytes, rel=0.01)
        assert section.update_s > 0
    assert (found.model, found.device, found.precision) == ("Tagger", "cpu", "fp32")
    assert found.device_memory_bytes > found.runtime_bytes > 10 << 20
    assert not found.estimated


def test_sizes_that_were_not_measured_are_between_those_that_were(measured: tuple[Path, Profiled]) -> None:
    section = measured[1].profile.sections[1]
    by_size = {costs.micro_batch_size: costs for costs in section.costs}
    assert {1, 2} <= set(by_size)
    three, four = section_costs(section, 3), section_costs(section, 4)
    assert by_size[2].activation_bytes < three.activation_bytes < four.activation_bytes
    assert three.forward_s > 0
    assert three.output_bytes == 3 * by_size[1].output_bytes


def test_the_second_start_is_from_the_cache(measured: tuple[Path, Profiled]) -> None:
    directory, first = measured
    again = profiled(directory)
    assert again.from_cache
    assert again.profile.sections == first.profile.sections
    assert again.path == first.path


@pytest.mark.parametrize(
    "changes",
    [
        {"model": Tagger(num_blocks=2)},
        {"model": Tagger(width=16)},
        {"precision": Precision.BF16},
        {"optimizer": torch.optim.SGD},
        {"batch": {name: value[:, :8] for name, value in text(2).items()}},
        {"micro_batch_sizes": (2,)},
        {"is_fresh": True},
    ],
    ids=["blocks", "width", "precision", "optimizer", "shape", "sizes", "fresh"],
)
def test_what_the_numbers_depend_on_is_measured_anew(
    measured: tuple[Path, Profiled], changes: dict[str, Any]
) -> None:
    directory, first = measured
    found = profiled(directory, **changes)
    assert not found.from_cache
    assert (found.path == first.path) == ("is_fresh" in changes)


def test_other_weights_and_learning_rates_are_the_same_model(measured: tuple[Path, Profiled]) -> None:
    directory, _ = measured
    model = Tagger()
    with torch.no_grad():
        model.embed.weight.zero_()
    assert profiled(directory, model=model).from_cache


@pytest.mark.parametrize("content", [b"{", b'{"version": 1}'], ids=["truncated", "incomplete"])
def test_a_damaged_profile_is_measured_again(tmp_path: Path, content: bytes) -> None:
    first = profiled(tmp_path)
    assert first.path is not None
    first.path.write_bytes(content)
    again = profiled(tmp_path)
    assert not again.from_cache
    assert read_profile(first.path).key == first.path.stem


def test_where_nothing_can_be_kept_a_job_starts_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not profiled(tmp_path / "file").from_cache
    assert not profiled(tmp_path / "file").from_cache


def test_without_a_directory_nothing_is_kept() -> None:
    found = profiled(None)
    assert found.path is None
    assert not found.from_cache
