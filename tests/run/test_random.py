"""Random numbers keyed by position: stable, apart, repeatable, and the user's generator left alone."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from varuna.run.random import Domain, preserved_generators, seed_for, seed_section

CPU = torch.device("cpu")
GOLDEN = (15424751921001482597, 481824898553554076, 5044559492031435026)


def test_keys_are_the_same_on_every_machine_and_version() -> None:
    assert seed_for(0, 0, 0, 0) == GOLDEN[0]
    assert seed_for(1234, 56, 7, 8) == GOLDEN[1]
    assert seed_for(1234, 56, 7, 8, domain=Domain.EVALUATE) == GOLDEN[2]


def test_no_two_places_share_a_key() -> None:
    places = itertools.product((0, 1, -1), range(20), range(20), range(10), Domain)
    keys = [seed_for(seed, step, k, section, domain=domain) for seed, step, k, section, domain in places]
    assert len(set(keys)) == len(keys) == 3 * 20 * 20 * 10 * len(Domain)
    assert all(0 <= key < 1 << 64 for key in keys)


def test_any_integer_is_a_seed() -> None:
    assert len({seed_for(seed, 0, 0, 0) for seed in (0, -1, 1 << 63, (1 << 64) - 2, 12)}) == 5


def test_dropout_does_not_depend_on_what_ran_before() -> None:
    dropout = nn.Dropout(0.5)
    seed_section(0, 3, 1, 2, CPU)
    first = dropout(torch.ones(100))
    torch.rand(17)
    seed_section(0, 3, 1, 3, CPU)
    other = dropout(torch.ones(100))
    seed_section(0, 3, 1, 2, CPU)
    assert torch.equal(dropout(torch.ones(100)), first)
    assert not torch.equal(other, first)


def test_the_users_numbers_go_on_as_if_nothing_had_been_trained() -> None:
    torch.manual_seed(5)
    expected = [torch.rand(3), torch.rand(3)]
    torch.manual_seed(5)
    found = [torch.rand(3)]
    with preserved_generators(CPU):
        seed_section(0, 0, 0, 0, CPU)
        torch.rand(1000)
    found.append(torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_users_numbers_survive_an_exception() -> None:
    torch.manual_seed(5)
    before = torch.default_generator.get_state()
    try:
        with preserved_generators(CPU):
            torch.rand(10)
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.default_generator.get_state(), before)
