"""Objects of the user's whose state goes into checkpoints and to newcomers: ``job.register(name, obj)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from torch import Tensor

from varuna.checkpoint.collect import EncodedState, encode_state
from varuna.checkpoint.tree import unflatten
from varuna.checkpoint.values import Json
from varuna.errors import ConfigError


class Stateful(Protocol):
    """Anything whose state can be taken out and put back."""

    def state_dict(self) -> Any:
        """Its state: numbers, text, bytes, tensors, NumPy values, and containers of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Become what ``state_dict`` was of."""


class Registry:
    """Registered objects by name."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}

    def register(self, name: str, obj: object) -> None:
        """Add one.

        Raises:
            ConfigError: no name, a name that is taken, or an object without ``state_dict``.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"register({name!r}, ...): the name must be a text, such as 'ema'.")
        if name in self._objects:
            raise ConfigError(
                f"{name!r} is registered already, as a {type(self._objects[name]).__name__}. Use another name."
            )
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(obj, method, None)):
                raise ConfigError(
                    f"register({name!r}, ...): a {type(obj).__name__} has no {method}(). Give it state_dict() "
                    f"and load_state_dict(state)."
                )
        self._objects[name] = cast(Stateful, obj)

    def encode(self) -> dict[str, EncodedState]:
        """The state of each as it is now: references to its tensors, not copies.

        Raises:
            StateError: it holds something that only pickle could store.
        """
        return {name: encode_state(obj.state_dict(), "registered", name) for name, obj in self._objects.items()}

    def load(self, stored: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
        """Give each object its stored state; what is on one side only is left as it is."""
        for name, obj in self._objects.items():
            if name in stored:
                obj.load_state_dict(unflatten(stored[name], tensors, f"registered {name}"))

    def compare(self, stored: Mapping[str, Json]) -> str:
        """What is registered on one side only, for people; empty if nothing is."""
        unknown = sorted(set(stored) - set(self._objects))
        new = sorted(set(self._objects) - set(stored))
        told = []
        if unknown:
            told.append(f"it has state of {', '.join(unknown)}, which this script does not register")
        if new:
            told.append(f"it has no state of {', '.join(new)}, which stays as the script made it")
        return "; ".join(told)
