"""Varuna trains what a plain loop trains: any model, layout, schedule and recompute, to the last bits.

The reference (``plain.py``) knows nothing of Varuna but the ids of the samples. Run all points of the product
with ``-m product``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.exact import covering, harness, models
from tests.exact.harness import Forker, Run

DEFAULT = covering.covering_set()
REST = [run for run in covering.product() if run not in DEFAULT]


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    with harness.forker(tmp_path_factory.mktemp("captures")) as running:
        yield running


@pytest.fixture(scope="module")
def with_dropout(forker: Forker) -> Iterator[harness.plain.Trained]:
    """The one-worker run that every other run with dropout must equal."""
    return forker.run(Run(case="dropout", num_stages=1, num_pipelines=1, schedule="varuna", recompute=False))


def check(run: Run, forker: Forker, request: pytest.FixtureRequest) -> None:
    case = models.case(run.case)
    expected = request.getfixturevalue("with_dropout") if case.random else harness.reference(run.case)
    harness.assert_same(forker.run(run), expected, case.bound)


@pytest.mark.parametrize("run", DEFAULT, ids=str)
def test_equals_the_plain_loop(run: Run, forker: Forker, request: pytest.FixtureRequest) -> None:
    check(run, forker, request)


@pytest.mark.product
@pytest.mark.parametrize("run", REST, ids=str)
def test_equals_the_plain_loop_everywhere(run: Run, forker: Forker, request: pytest.FixtureRequest) -> None:
    check(run, forker, request)


def test_dropout_is_on(with_dropout: harness.plain.Trained) -> None:
    assert with_dropout.losses != harness.reference("gpt").losses


def test_default_runs_cover_every_pair() -> None:
    covered = set(itertools.chain.from_iterable(covering.pairs(run) for run in DEFAULT))
    wanted = set(itertools.chain.from_iterable(covering.pairs(run) for run in covering.product()))
    assert covered == wanted
    assert {run.case for run in DEFAULT} == {case.name for case in models.CASES}
