"""What Kubernetes accepts as a name, a quantity, a label or an image, told before it is asked. Pure.

The rules are those of the API's own validation; a manifest that breaks one is refused when it is applied, or
never starts, which is later than anybody wants to know.
"""

from __future__ import annotations

import re

from varuna.errors import ConfigError

MOST_LETTERS = 40
"""Of a job's name: Kubernetes adds to it, and allows 63 for what comes out (``NAME-agents-0-9999-x7k2p``)."""

_JOB = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_CPU = re.compile(r"\d+(\.\d{1,3})?|\d+m", re.ASCII)
_BYTES = re.compile(r"\d+(\.\d+)?([kMGTPE]|[KMGTPE]i)?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::\d+)?/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?",
    re.ASCII,
)


def check_job_name(name: str, where: str) -> None:
    """A name that others are made of, of a Service among them.

    Raises:
        ConfigError: with the rule that it breaks; the same for all functions here.
    """
    if not _JOB.fullmatch(name) or len(name) > MOST_LETTERS:
        raise ConfigError(
            f"{where} {name[:80]!r}: Kubernetes takes small letters, digits and '-', a letter first and no '-' "
            f"last, here {MOST_LETTERS} at most."
        )


def check_namespace(name: str, where: str) -> None:
    """A DNS label."""
    if not _LABEL.fullmatch(name) or len(name) > 63:
        raise ConfigError(
            f"{where} {name[:80]!r}: Kubernetes takes small letters, digits and '-', no '-' first or last, 63 "
            f"at most."
        )


def check_object_name(name: str, where: str) -> None:
    """Of a Secret, a claim, a storage class, a service account: a DNS subdomain."""
    if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
        raise ConfigError(
            f"{where} {name[:80]!r}: Kubernetes takes small letters, digits, '-' and '.', a letter or digit "
            f"first and last, 253 at most."
        )


def check_label_key(key: str, where: str) -> None:
    """Of a label, a taint or a resource: ``name`` or ``prefix/name``."""
    prefix, slash, name = key.rpartition("/")
    if slash:
        check_object_name(prefix, where)
    if not _QUALIFIED.fullmatch(name) or len(name) > 63:
        raise ConfigError(
            f"{where} {key[:80]!r}: Kubernetes takes [PREFIX/]NAME, where NAME has letters, digits, '-', '_' "
            f"and '.', a letter or digit first and last, 63 at most."
        )


def check_label_value(value: str, where: str) -> None:
    """Of a label or a taint; may be empty."""
    if value and (not _QUALIFIED.fullmatch(value) or len(value) > 63):
        raise ConfigError(
            f"{where} {value[:80]!r}: Kubernetes takes letters, digits, '-', '_' and '.', a letter or digit "
            f"first and last, 63 at most."
        )


def check_cpu(text: str, where: str) -> None:
    """Cores: ``4``, ``0.5`` or ``500m``."""
    if not _CPU.fullmatch(text) or not float(text.rstrip("m")):
        raise ConfigError(f"{where} {text!r} is no number of cores. Write 4, 0.5 or 500m.")


def check_bytes(text: str, where: str) -> None:
    """Bytes: ``16Gi``, ``500M``."""
    found = _BYTES.fullmatch(text)
    if not found or not text.isascii() or not float(text.rstrip("kKMGTPEi")):
        raise ConfigError(f"{where} {text!r} is no size. Write 16Gi, 500Mi or 100G.")


def check_image(text: str, where: str) -> None:
    """A container image: ``registry.example.org/team/varuna:1.0``."""
    if not _IMAGE.fullmatch(text) or len(text) > 512:
        raise ConfigError(
            f"{where} {text[:80]!r} is no image. Write [REGISTRY[:PORT]/]NAME[:TAG][@sha256:DIGEST], with "
            f"small letters in NAME."
        )


def check_path(text: str, where: str) -> None:
    """A folder in a container: absolute, without ':'."""
    if not text.startswith("/") or ":" in text or not text.isprintable() or ".." in text.split("/"):
        raise ConfigError(f"{where} {text[:80]!r} is no folder in a container. Write /data, say.")
