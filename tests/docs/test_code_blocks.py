"""Code in the documentation runs: every Python block; every `varuna` command has the options it is shown with.

What commands print is compared where it is shown in full (``tests/plan/test_docs.py``).
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from varuna.cli import main
from varuna.cli.sbatch import SbatchCommand

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md"), REPOSITORY / "benchmarks/README.md"]
)
ELSEWHERE = ("docs/concepts/notices.md",)
"""Pages whose Python is run by tests of their own."""


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each fenced block."""
    fenced = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for _, language, text in fenced.findall(page.read_text(encoding="utf-8")):
        yield language, textwrap.dedent(text)


# --- commands -------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[str]:
    for _, text in blocks(page):
        for line in text.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:\$ )?(varuna [a-z].*)", line):
                yield re.split(r"\s{3,}|\s#", match[1])[0]


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
def test_commands_exist_with_these_options(page: Path) -> None:
    for line in commands(page):
        words = [word.strip("[]") for word in shlex.split(line)[1:]]
        command: click.Command = main
        context = main.context_class(main, info_name="varuna", **main.context_settings)
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0])
            assert found is not None, f"{line}: there is no {words[0]}"
            command = found
            context = command.context_class(
                command, info_name=words.pop(0), parent=context, **command.context_settings
            )
        if isinstance(command, SbatchCommand):
            words = command.own_words(context, words)
        command.make_parser(context).parse_args(words)  # raises for an option that is not there


# --- Python ---------------------------------------------------------------------------------


def llama() -> dict[str, Any]:
    """A model directory and a dataset for the guide."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained("llama")
    tokens = torch.randint(0, 32, (64, 8))
    return {"dataset": [{"input_ids": row, "labels": row} for row in tokens]}


SETUPS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": dict,
    "docs/concepts/partition.md": dict,
    "docs/guides/capture-errors.md": dict,
    "docs/guides/huggingface.md": llama,
}


@pytest.mark.parametrize("name", SETUPS)
def test_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VARUNA_CACHE_DIR", str(tmp_path / "cache"))
    namespace: dict[str, Any] = {"__name__": "__main__", **SETUPS[name]()}
    for language, text in blocks(REPOSITORY / name):
        if language == "python":
            exec(compile(text, name, "exec"), namespace)
    if "job" in namespace:
        namespace["job"].close()
    if name == "docs/guides/huggingface.md":
        assert "model.safetensors" in os.listdir("llama-tuned")


def test_no_python_is_left_out() -> None:
    with_python = {name_of(page) for page in PAGES if any(language == "python" for language, _ in blocks(page))}
    assert with_python == {*SETUPS, *ELSEWHERE}


# --- links ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "LOG.md", REPOSITORY / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{name_of(page)}: {target} is none of {anchors}"
