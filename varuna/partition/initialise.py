"""Initial values of single modules' tensors, as building the whole model would give, without building it.

Initialisation functions work on modules and may reach into children, so they are run on a *shadow*: a copy of
the module tree whose tensors are all on the meta device, except those of the one module being initialised.
Writes to meta tensors do nothing and draw no random numbers, so the values of a module never depend on what
else is here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from varuna.errors import UserError

_UNSET_BYTE = 2  # no bool has it


class Initialiser:
    """Makes values for tensors of a model.

    Args:
        model: the user's model; it is not changed.
        seed: the job's seed.
        init_weights: the user's function of a module; None: the model's own ``_init_weights`` if it has one.
    """

    def __init__(
        self, model: nn.Module, seed: int, init_weights: Callable[[nn.Module], object] | None = None
    ) -> None:
        self._seed = seed
        self._init_weights = init_weights
        self._shadows: dict[str, nn.Module] = {}
        meta: dict[int, Tensor] = {}
        self._make_shadow(model, "", meta, {})

    def values_for(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values on the CPU for tensors by their canonical names.

        Raises:
            UserError: nothing writes to one of them.
        """
        by_owner: dict[str, list[str]] = {}
        for name in names:
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
        values: dict[str, Tensor] = {}
        for owner, owned in by_owner.items():
            made = self._values_of(owner)
            for name in owned:
                value = made[name.rpartition(".")[2]]
                if _is_unset(value):
                    raise _no_values(name, owner, self._shadows[owner])
                values[name] = value
        return values

    def _make_shadow(
        self, module: nn.Module, path: str, meta: dict[int, Tensor], made: dict[int, nn.Module]
    ) -> nn.Module:
        if id(module) not in made:
            shadow = module.__class__.__new__(module.__class__)
            shadow.__dict__.update(module.__dict__)
            made[id(module)] = shadow
            shadow.__dict__["_parameters"] = {n: _meta(p, meta) for n, p in module._parameters.items()}
            shadow.__dict__["_buffers"] = {n: _meta(b, meta) for n, b in module._buffers.items()}
            shadow.__dict__["_modules"] = {
                name: None if child is None else self._make_shadow(child, _join(path, name), meta, made)
                for name, child in module._modules.items()
            }
        self._shadows[path] = made[id(module)]
        for name, child in module._modules.items():
            if child is not None and _join(path, name) not in self._shadows:
                self._make_shadow(child, _join(path, name), meta, made)
        return made[id(module)]

    def _values_of(self, owner: str) -> dict[str, Tensor]:
        """All own tensors of one module, initialised; tensors that nothing writes to stay unset."""
        module = self._shadows[owner]
        saved = dict(module._parameters), dict(module._buffers)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(_unset(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _unset(buffer)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
                torch.default_generator.manual_seed(self._key(owner))
                self._initialise(owner)
            own = {**module._parameters, **module._buffers}
            return {name: value.detach() for name, value in own.items() if value is not None}
        finally:
            module.__dict__["_parameters"], module.__dict__["_buffers"] = saved

    def _initialise(self, owner: str) -> None:
        around = [self._shadows[path] for path in _path_upwards(owner)]
        for module in around:
            _reset(module)
        for index, module in enumerate(around):
            if self._init_weights is not None:
                self._init_weights(module)
                continue
            model = next((m for m in around[index:] if callable(getattr(m, "_init_weights", None))), None)
            if model is not None:
                model._init_weights(module)  # type: ignore[operator]

    def _key(self, owner: str) -> int:
        text = f"{self._seed} {owner}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _path_upwards(path: str) -> list[str]:
    paths = [path]
    while path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _reset(module: nn.Module) -> None:
    """What the constructor would have called."""
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            method()
            return


def _meta(tensor: Tensor | None, known: dict[int, Tensor]) -> Tensor | None:
    if tensor is None:
        return None
    if id(tensor) not in known:
        empty = torch.empty_like(tensor.detach(), device="meta")
        known[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    return known[id(tensor)]


def _unset(like: Tensor) -> Tensor:
    """A CPU tensor full of a mark that no initialisation leaves behind."""
    made = torch.empty_like(like.detach(), device="cpu")
    if made.dtype is torch.bool:
        made.view(torch.uint8).fill_(_UNSET_BYTE)
    elif made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    else:
        made.fill_(torch.iinfo(made.dtype).max)
    return made


def _is_unset(value: Tensor) -> bool:
    if value.dtype is torch.bool:
        return bool((value.view(torch.uint8) == _UNSET_BYTE).any())
    if value.is_floating_point() or value.is_complex():
        return bool(value.isnan().any())
    return bool((value == torch.iinfo(value.dtype).max).any())


def _no_values(name: str, owner: str, module: nn.Module) -> UserError:
    kind = "buffer" if name.rpartition(".")[2] in module._buffers else "parameter"
    return UserError(
        f"The {kind} {name!r} was built on the meta device and nothing gives it values: its module "
        f"{owner or '(the model)'!r} ({type(module).__name__}) has no reset_parameters() that sets it, and "
        f"neither "
        "_init_weights(module) of the model nor init_weights does. Add a reset_parameters() method to that "
        "module, "
        "pass init_weights=function(module), or build the model on the CPU."
    )
