"""What the environment says, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from varuna.config import SCHEDULE_NAMES, LayoutConfig, MorphConfig, ProfileConfig, WorldConfig, cache_dir
from varuna.errors import ConfigError
from varuna.plan import SCHEDULES

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "night",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_plain_python_is_one_worker() -> None:
    assert WorldConfig.from_env({"PATH": "/bin", "MASTER_ADDR": "left-over"}) == WorldConfig()
    world = WorldConfig()
    assert (world.rank, world.world_size, world.launched_by, world.master_port) == (0, 1, "none", 0)


def test_torchrun() -> None:
    world = WorldConfig.from_env(TORCHRUN)
    assert world == WorldConfig(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="10.0.0.7",
        master_port=29500,
        store_is_hosted=True,
        run_id="night",
        restart_count=2,
        launched_by="torchrun",
    )


def test_varuna_run() -> None:
    environ = {**TORCHRUN, "VARUNA_RUN_ID": "demo", "VARUNA_TOKEN": "secret", "VARUNA_FAILURE_DIR": "/logs"}
    world = WorldConfig.from_env(environ)
    assert (world.launched_by, world.run_id, world.token, world.failure_dir) == (
        "varuna",
        "demo",
        "secret",
        "/logs",
    )
    assert world.store_is_hosted
    assert "secret" not in repr(world)


def test_by_hand_worker_0_hosts_the_store() -> None:
    by_hand = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    world = WorldConfig.from_env(by_hand)
    assert (world.store_is_hosted, world.local_rank, world.local_world_size) == (False, 3, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE", "RANK=3", "Unset", "varuna run"]),
        ({"RANK": ""}, ["not RANK", "LOCAL_RANK=1"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR"]),
        ({"MASTER_PORT": ""}, ["MASTER_PORT"]),
        ({"RANK": "4"}, ["RANK=4", "WORLD_SIZE=4", "0 to 3"]),
        ({"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({"RANK": "-1"}, ["RANK=-1", "at least 0"]),
        ({"RANK": "one"}, ["RANK='one'", "whole number"]),
        ({"WORLD_SIZE": "4.0"}, ["WORLD_SIZE='4.0'", "whole number"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "at least 1"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT=99999", "65535"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, ["TORCHELASTIC_RESTART_COUNT='x'"]),
    ],
)
def test_half_a_world_or_a_wrong_one_is_refused(change: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        WorldConfig.from_env({**TORCHRUN, **change})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_local_rank_without_a_world_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LOCAL_RANK=0 .*not RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        WorldConfig.from_env({"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    "layout",
    [
        LayoutConfig(),
        LayoutConfig(num_stages=2, micro_batch_size=8, schedule="1f1b", recompute=True, check=False),
        LayoutConfig(recompute=False),
        LayoutConfig(num_stages=3, recompute=(True, False, True)),
        LayoutConfig(recompute=(True, False)),
    ],
)
def test_a_layout_survives_the_environment(layout: LayoutConfig) -> None:
    assert LayoutConfig.from_env(layout.to_env()) == layout


def test_flags_go_before_the_scripts_own_layout() -> None:
    script = LayoutConfig(num_stages=1, micro_batch_size=4, recompute=True)
    assert LayoutConfig().over(None) == LayoutConfig()
    assert LayoutConfig().over(script) == script
    flags = LayoutConfig(num_stages=2, schedule="gpipe", recompute=False, check=False)
    assert flags.over(script) == LayoutConfig(
        num_stages=2, micro_batch_size=4, schedule="gpipe", recompute=False, check=False
    )
    with pytest.raises(ConfigError, match="2 recompute flags for 3 stages"):
        LayoutConfig(num_stages=3).over(LayoutConfig(recompute=(True, False)))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"VARUNA_STAGES": "0"}, ["VARUNA_STAGES=0", "at least 1"]),
        ({"VARUNA_STAGES": "two"}, ["VARUNA_STAGES='two'"]),
        ({"VARUNA_MICRO_BATCH_SIZE": "-4"}, ["VARUNA_MICRO_BATCH_SIZE=-4"]),
        ({"VARUNA_SCHEDULE": "zigzag"}, ["'zigzag'", "varuna, 1f1b, gpipe"]),
        ({"VARUNA_RECOMPUTE": "maybe"}, ["VARUNA_RECOMPUTE='maybe'", "1 or 0"]),
        ({"VARUNA_RECOMPUTE": "1,,1"}, ["VARUNA_RECOMPUTE=''"]),
        ({"VARUNA_RECOMPUTE": "1,0", "VARUNA_STAGES": "3"}, ["2 recompute flags", "3 stages"]),
        ({"VARUNA_CHECK": "2"}, ["VARUNA_CHECK='2'"]),
    ],
)
def test_a_wrong_layout_is_refused(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        LayoutConfig.from_env(environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_layout_arguments_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="number of stages is 0"):
        LayoutConfig(num_stages=0)
    with pytest.raises(ConfigError, match="micro-batch size is -1"):
        LayoutConfig(micro_batch_size=-1)


def test_every_named_schedule_exists() -> None:
    assert SCHEDULE_NAMES == SCHEDULES


@pytest.mark.parametrize(
    "profile",
    [
        ProfileConfig(),
        ProfileConfig(wanted=True),
        ProfileConfig(wanted=False, output=Path("/there/p.json"), micro_batch_sizes=(1, 8)),
    ],
)
def test_what_to_measure_survives_the_environment(profile: ProfileConfig) -> None:
    assert ProfileConfig.from_env(profile.to_env()) == profile


def test_sizes_to_measure_are_numbers_from_one_on() -> None:
    assert ProfileConfig.from_env({"VARUNA_PROFILE_SIZES": "8,1,8"}).micro_batch_sizes == (1, 8)
    for text in ("0", "1,", "two"):
        with pytest.raises(ConfigError, match="VARUNA_PROFILE_SIZES"):
            ProfileConfig.from_env({"VARUNA_PROFILE_SIZES": text})
    with pytest.raises(ConfigError, match="VARUNA_PROFILE='maybe'"):
        ProfileConfig.from_env({"VARUNA_PROFILE": "maybe"})


def test_cache_directory() -> None:
    assert cache_dir({"VARUNA_CACHE_DIR": "/fast/v", "XDG_CACHE_HOME": "/x"}) == Path("/fast/v")
    assert cache_dir({"VARUNA_CACHE_DIR": "here"}) == Path.cwd() / "here"
    assert cache_dir({"XDG_CACHE_HOME": "/x", "HOME": "/home/me"}) == Path("/x/varuna")
    assert cache_dir({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}) == Path("/home/me/.cache/varuna")
    with pytest.raises(ConfigError, match="VARUNA_CACHE_DIR"):
        cache_dir({})


def test_how_a_job_goes_on() -> None:
    assert MorphConfig.from_env({}) == MorphConfig()
    assert MorphConfig.from_env({"VARUNA_MORPH": "0"}) is None
    assert MorphConfig.from_env({"VARUNA_MORPH": "0"}, wanted=True) == MorphConfig()
    environ = {
        "VARUNA_HEARTBEAT_S": "3",
        "VARUNA_MANAGER_S": "20",
        "VARUNA_REPLACE_LOST": "1",
        "VARUNA_FIND_SLOW": "0",
        "VARUNA_REST_S": "1.5",
    }
    config = MorphConfig(
        heartbeat_limit_s=3.0, manager_limit_s=20.0, replace_lost=True, finds_slow=False, rest_s=1.5
    )
    assert MorphConfig.from_env(environ) == config
    without = MorphConfig.from_env(environ, replace_lost=False)
    assert without is not None
    assert not without.replace_lost


@pytest.mark.parametrize("name", ["VARUNA_HEARTBEAT_S", "VARUNA_MANAGER_S", "VARUNA_REST_S"])
@pytest.mark.parametrize("text", ["0.5", "inf", "nan", "soon"])
def test_numbers_of_seconds_that_cannot_be(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{text}' is no number of seconds"):
        MorphConfig.from_env({name: text})
