"""Names of tensors in a checkpoint: ``parameters/<name>``, ``optimizer/<name>/<key>``, ``buffers/<name>``.

``<name>`` is the user's own (``model.named_parameters()``; of a tied weight the first one). A slash or percent
sign inside a piece is written ``%2F`` or ``%25``, so that a name divides in one way only.
"""

from __future__ import annotations

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"
BUFFERS = "buffers"
JOB = "job"


def parameter_name(name: str) -> str:
    """The value of a parameter."""
    return f"{PARAMETERS}/{_escape(name)}"


def buffer_name(name: str) -> str:
    """The value of a buffer."""
    return f"{BUFFERS}/{_escape(name)}"


def optimizer_name(name: str, key: str) -> str:
    """One entry of a parameter's optimizer state."""
    return f"{OPTIMIZER}/{_escape(name)}/{_escape(key)}"


def job_name(*pieces: str) -> str:
    """A tensor that belongs to no section: of registered objects, or a learning rate that is a tensor."""
    return "/".join((JOB, *map(_escape, pieces)))


def split_name(text: str) -> tuple[str, ...]:
    """The pieces of a name, as they were before escaping: kind first."""
    return tuple(piece.replace("%2F", "/").replace("%25", "%") for piece in text.split("/"))


def _escape(piece: str) -> str:
    if "/" not in piece and "%" not in piece:
        return piece
    return piece.replace("%", "%25").replace("/", "%2F")
