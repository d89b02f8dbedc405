"""The cheap part of the preflight, which every launcher makes by itself before it starts anything."""

from __future__ import annotations

from collections.abc import Mapping

from varuna.errors import ConfigError
from varuna.launch.output import say
from varuna.launch.preflight.findings import place_for
from varuna.launch.preflight.gather import places


def check_places(environ: Mapping[str, str]) -> None:
    """Whether a job with these variables can write where it has to; what would cost it something is told.

    Raises:
        ConfigError: it would stop.
    """
    for place in places(environ, environ.get("VARUNA_CHECKPOINT", "")):
        level, found, mend = place_for(place)
        if level == "stops":
            raise ConfigError(f"{place.what}: {found.rstrip('.')}. {mend} `varuna doctor` looks at everything.")
        if place.problem:
            say(f"warning: {place.what}: {found}. {mend}")
