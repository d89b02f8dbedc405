"""Which clouds are here: all are asked at once, once, with a short limit.

Off the cloud this costs at most three requests and ``DETECT_S`` of waiting in the background, nothing printed,
and nothing ever after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from varuna.errors import ConfigError
from varuna.events import Notice
from varuna.morph import notices_gcp
from varuna.morph.notices import NoticeSource, Report
from varuna.morph.notices_aws import AwsNotices
from varuna.morph.notices_azure import AzureNotices
from varuna.morph.notices_gcp import GcpNotices
from varuna.morph.notices_signal import duration_from_env
from varuna.morph.notices_source import BASE_URL
from varuna.morph.waiting import RealWaiting, Waiting

DETECT_S = 5.0
"""A metadata service is on the same host and answers in milliseconds, but a starting machine is busy."""

CLOUDS = ("aws", "gcp", "azure")


async def detect_clouds(
    machine: str,
    report: Report,
    *,
    environ: Mapping[str, str],
    waiting: Waiting | None = None,
    limit_s: float = DETECT_S,
) -> tuple[NoticeSource, ...]:
    """The sources that answer here; usually one or none.

    Args:
        machine: the agent's name for this machine.
        report: where troubles are published for people; off the cloud nothing is.
        environ: see ``sources_from_env``.
        waiting: time.
        limit_s: a service that has not answered by then is not here.

    Raises:
        ConfigError: a variable that cannot be.
    """
    waiting = waiting or RealWaiting()
    sources = sources_from_env(machine, report, environ=environ, waiting=waiting)
    answers = await asyncio.gather(*(_answers(source, waiting, limit_s) for source in sources))
    found = tuple(source for source, is_here in zip(sources, answers, strict=True) if is_here)
    if environ.get("VARUNA_CLOUD"):
        for missing in [source.source for source in sources if source not in found]:
            text = (
                f"VARUNA_CLOUD names {missing}, but its metadata service did not answer within {limit_s:g} s: "
                f"no notices of {missing} will be seen on {machine}. In a container it may be out of reach."
            )
            report(Notice(text=text))
    return found


def sources_from_env(
    machine: str, report: Report, *, environ: Mapping[str, str], waiting: Waiting
) -> Sequence[NoticeSource]:
    """A source for every cloud to be asked.

    ``VARUNA_CLOUD``: ``aws``, ``gcp``, ``azure``, several with commas, or ``none``; all by default. Where they
    are: ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` (a URL) and ``AWS_EC2_METADATA_DISABLED``, ``GCE_METADATA_HOST``
    (host or host:port), as in the providers' own clients; ``VARUNA_AZURE_METADATA_URL``.
    ``VARUNA_GCP_NOTICE_S``: seconds.

    Raises:
        ConfigError: a variable that cannot be.
    """
    sources: list[NoticeSource] = []
    wanted = _wanted(environ)
    if "aws" in wanted and environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
        url = _url(environ, "AWS_EC2_METADATA_SERVICE_ENDPOINT", BASE_URL)
        sources.append(AwsNotices(machine, report, base_url=url, waiting=waiting))
    if "gcp" in wanted:
        host = environ.get("GCE_METADATA_HOST", "")
        url = f"http://{host}" if host else BASE_URL
        text = environ.get("VARUNA_GCP_NOTICE_S", "")
        notice_s = duration_from_env("VARUNA_GCP_NOTICE_S", text) if text else notices_gcp.NOTICE_S
        sources.append(GcpNotices(machine, report, base_url=url, waiting=waiting, notice_s=notice_s))
    if "azure" in wanted:
        url = _url(environ, "VARUNA_AZURE_METADATA_URL", BASE_URL)
        sources.append(AzureNotices(machine, report, base_url=url, waiting=waiting))
    return sources


def _wanted(environ: Mapping[str, str]) -> tuple[str, ...]:
    text = environ.get("VARUNA_CLOUD", "").strip().lower()
    if not text:
        return CLOUDS
    names = tuple(name.strip() for name in text.split(","))
    if names == ("none",):
        return ()
    for name in names:
        if name not in CLOUDS:
            raise ConfigError(
                f"VARUNA_CLOUD={text!r} names {name!r}. Set it to {', '.join(CLOUDS)} (several with "
                f"commas), or none."
            )
    return names


def _url(environ: Mapping[str, str], name: str, default: str) -> str:
    url = environ.get(name, "") or default
    if not url.startswith("http://"):
        raise ConfigError(f"{name}={url!r} does not begin with http://. Set it to a URL like {default}.")
    return url


async def _answers(source: NoticeSource, waiting: Waiting, limit_s: float) -> bool:
    try:
        return await waiting.within(limit_s, source.detect())
    except TimeoutError:
        return False
