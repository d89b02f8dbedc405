"""Files of profiles and plans: read back as written, refused with the file's name and what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from varuna.errors import ConfigError
from varuna.plan.profile import LinkProfile, Profile, SectionProfile, TaskCosts, Tie
from varuna.plan.profile_file import read_plan, read_profile, write_plan, write_profile
from varuna.spec import PipelineSpec, Plan, StageSpec

LINK = LinkProfile(latency_s=1e-4, bytes_per_s=1e9, jitter_s=(0.0, 1e-3), send_s=1e-5)
COSTS = TaskCosts(micro_batch_size=2, forward_s=0.1, recompute_s=0.1, backward_s=0.2, activation_bytes=2**40)
PROFILE = Profile(
    model="GPT",
    key="ab12",
    device="cpu",
    precision="bf16",
    notes=("höchstens",),
    device_memory_bytes=2**36,
    sections=tuple(
        SectionProfile(
            index=index,
            name=f"blocks.{index}",
            parameter_bytes=4,
            gradient_bytes=4,
            optimizer_bytes=8,
            update_s=0.25,
            costs=(COSTS, replace(COSTS, micro_batch_size=4)),
        )
        for index in range(2)
    ),
    ties=(Tie(name="embedding.weight", num_bytes=4, section_indices=(0, 1)),),
    within_machine=LINK,
    across_machines=replace(LINK, shared_bytes_per_s=1e9),
)
PLAN = Plan(
    pipelines=(
        PipelineSpec(
            stages=(
                StageSpec(worker_index=1, first_section=0, end_section=1, recompute=True),
                StageSpec(worker_index=0, first_section=1, end_section=2),
            ),
            first_micro_batch=0,
            end_micro_batch=3,
        ),
    ),
    num_workers=2,
    num_sections=2,
    batch_size=6,
    micro_batch_size=2,
    schedule="varuna",
)


def test_profiles_and_plans_are_read_back_as_written(tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path / "new" / "p.json")
    assert read_profile(tmp_path / "new" / "p.json") == PROFILE
    write_plan(PLAN, tmp_path / "plan.json", reason="because")
    assert read_plan(tmp_path / "plan.json") == PLAN
    assert json.loads((tmp_path / "plan.json").read_text())["reason"] == "because"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "p.json", "plan.json"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(PROFILE, path)
    before = path.stat().st_ino
    write_profile(replace(PROFILE, model="other"), path)
    assert path.stat().st_ino != before
    assert read_profile(path).model == "other"
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="folder"):
        write_profile(PROFILE, tmp_path / "folder")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "p.json"]


@pytest.mark.parametrize("read", [read_profile, read_plan])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"version": 1,\n "plan', r"line 2, column 2 \(character 16 of 21\): it was cut short"),
        (b'{"version": 1, "plan": nothing}', r"line 1, column 24 \(character 23 of 31\): Expecting value"),
        (b"\xff\xfe", "byte 0 is no UTF-8 text"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"version": 7}', "version 7; this Varuna reads version 1"),
        (b'{"version": 1}', "missing required field"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, read: object, content: bytes, says: str) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read(path)  # type: ignore[operator]
    assert str(path) in str(caught.value)


def test_a_plan_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        write_plan(PLAN, tmp_path / "new" / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*varuna profile"):
        read_profile(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: replace(p, sections=()), "no sections"),
        (lambda p: replace(p, sections=p.sections[::-1]), "section 1 stands where 0 belongs"),
        (lambda p: replace(p, sections=(replace(p.sections[0], costs=()),)), "at least one"),
        (
            lambda p: replace(p, sections=(replace(p.sections[0], costs=p.sections[0].costs[::-1]),)),
            r"\[4, 2\].*ascending",
        ),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(tmp_path: Path, change: object, says: str) -> None:
    write_profile(change(PROFILE), tmp_path / "p.json")  # type: ignore[operator]
    with pytest.raises(ConfigError, match=says):
        read_profile(tmp_path / "p.json")


def test_a_plan_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    document["plan"]["batch_size"] = 60
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"plan\.json is not a plan: Pipelines cover 3 of 30 micro-batches"):
        read_plan(tmp_path / "plan.json")
