"""Options of sbatch among those of a `varuna` command: any long one may be given before the script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from varuna.errors import ConfigError

_KEY = "varuna.sbatch"
_WITHOUT_VALUE = frozenset(
    (
        "--contiguous", "--exclusive", "--get-user-env", "--hold", "--ignore-pbs", "--no-requeue", "--nice",
        "--no-kill", "--overcommit", "--oversubscribe", "--propagate", "--quiet", "--reboot", "--requeue",
        "--share", "--spread-job", "--test-only", "--use-min-nodes", "--verbose",
    )
)  # fmt: skip
"""Options of sbatch that take no value, or only one behind ``=``."""

_OURS = {
    "--wrap": "the script is the one that you give",
    "--chdir": "the script runs in the folder in which the command is given",
    "--parsable": "it is given anyway",
    "--wait": "the job is submitted, and not waited for",
}


@dataclass(frozen=True, kw_only=True)
class Divided:
    """A command line.

    Attributes:
        own: the command's own options.
        sbatch: those of sbatch, in the form ``--name=value`` or ``--name``.
        rest: from the first word on that is no option.
    """

    own: tuple[str, ...]
    sbatch: tuple[str, ...]
    rest: tuple[str, ...]


def divide(words: Sequence[str], takes_value: Mapping[str, bool]) -> Divided:
    """Long options that the command does not know are sbatch's.

    Args:
        words: of the command line.
        takes_value: the command's own options, with their dashes.

    Raises:
        ConfigError: an option without its value, or one that cannot be.
    """
    own: list[str] = []
    sbatch: list[str] = []
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        word = words[position]
        name, equals, _ = word.partition("=")
        has_next = position + 1 < len(words)
        if not word.startswith("--"):
            num_taken = 2 if _wants_next(word, takes_value) else 1
            own += words[position : position + num_taken]
        elif name in takes_value:
            num_taken = 2 if takes_value[name] and not equals else 1
            own += words[position : position + num_taken]
        elif name in _OURS:
            raise ConfigError(f"{name} cannot be given: {_OURS[name]}.")
        elif equals or name in _WITHOUT_VALUE:
            num_taken = 1
            sbatch.append(word)
        elif has_next and not words[position + 1].startswith("--"):
            num_taken = 2
            sbatch.append(f"{name}={words[position + 1]}")
        else:
            raise ConfigError(f"{name}, taken for an option of sbatch, has no value. Write {name}=VALUE.")
        position += num_taken
    return Divided(own=tuple(own), sbatch=tuple(sbatch), rest=tuple(words[position:]))


def _wants_next(word: str, takes_value: Mapping[str, bool]) -> bool:
    """Whether the value of short options, such as ``-mw``, is the next word."""
    for index, letter in enumerate(word[1:], 1):
        if takes_value.get(f"-{letter}", False):
            return index == len(word) - 1
    return False


def sbatch_options_of(ctx: click.Context) -> tuple[str, ...]:
    """Those that a ``SbatchCommand`` was given."""
    found: tuple[str, ...] = ctx.meta.get(_KEY, ())
    return found


class SbatchCommand(click.Command):
    """A command that takes options of sbatch; one that has a flag ``--slurm``, only if that is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See ``click.Command``."""
        return super().parse_args(ctx, self.own_words(ctx, args))

    def own_words(self, ctx: click.Context, args: list[str]) -> list[str]:
        """A command line without options of sbatch, which are kept for ``sbatch_options_of``."""
        takes_value = {
            name: not (option.is_flag or option.count)
            for option in self.params
            if isinstance(option, click.Option)
            for name in (*option.opts, *option.secondary_opts)
        }
        takes_value |= dict.fromkeys(ctx.help_option_names, False)
        if "--slurm" in takes_value and "--slurm" not in args:
            return args
        divided = divide(args, takes_value)
        if "--slurm" in takes_value and "--slurm" not in divided.own:  # it is the script's
            return args
        words, sbatch = [*divided.own], [*divided.sbatch]
        while divided.rest and ctx.allow_interspersed_args:  # options may come behind, too
            words.append(divided.rest[0])
            divided = divide(divided.rest[1:], takes_value)
            words += divided.own
            sbatch += divided.sbatch
        ctx.meta[_KEY] = tuple(sbatch)
        return [*words, *divided.rest]
