"""What to do when capture stops: which module becomes an opaque leaf, or which error the user gets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from varuna.errors import CaptureError, VarunaError
from varuna.partition.blame import causes, find_blame
from varuna.partition.customgrad import CustomGradientError
from varuna.partition.cutpoint import CutPoint
from varuna.partition.leafprobe import ProbeError

LARGEST_LEAF_SHARE = 0.8

DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)

WAYS_OUT = (
    "Three ways out: (1) rewrite the line so that it computes on tensors, e.g. with torch.where, and set "
    "options that "
    "skip layers at random (layerdrop) to 0; (2) move it into a submodule of its own, which then becomes an "
    "opaque leaf "
    "by itself or with opaque=['name']; (3) give Varuna an nn.Sequential or a list of modules, which is its "
    "own sections."
)


def is_data_dependent(error: BaseException) -> bool:
    """Whether capture stopped because the code looked at a tensor's values."""
    return any(isinstance(cause, DATA_DEPENDENT) for cause in causes(error))


def is_opaque(error: BaseException) -> bool:
    """Whether a graph cannot hold what stopped capture, for whatever number of samples."""
    return is_data_dependent(error) or any(isinstance(cause, CustomGradientError) for cause in causes(error))


def raise_own(error: BaseException) -> None:
    """Raises the error of ours that is behind ``error``, if there is one."""
    for cause in causes(error):
        if isinstance(cause, (VarunaError, ProbeError)):
            raise cause


def leaf_paths(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Paths as ``named_modules`` has them, without those that lie inside another one."""
    by_module = {id(module): path for path, module in model.named_modules()}
    known = []
    for path in paths:
        try:
            known.append(by_module[id(model.get_submodule(path))])
        except AttributeError:
            raise CaptureError(f"opaque={path!r}: the model has no such module.") from None
    if "" in known:
        raise CaptureError(
            "The whole model cannot be opaque: there would be nothing to divide. Name modules inside it."
        )
    return sorted({path for path in known if not any(path.startswith(f"{other}.") for other in known)})


def next_leaves(error: Exception, model: nn.Module, leaves: Sequence[str]) -> list[str]:
    """The modules to make opaque because of ``error``: the innermost one and all others of its class.

    Raises:
        CaptureError: none may be opaque.
    """
    blame = find_blame(error, model)
    path = blame.modules[-1] if blame.modules else ""
    if not path or path in leaves:
        raise as_error(error, model) from error
    obstacle = _obstacle(model, path)
    if obstacle:
        raise CaptureError(f"{what_happened(error, model)} {obstacle} {WAYS_OUT}") from error
    kind = type(model.get_submodule(path))
    if kind.__module__.startswith("torch."):
        return [path]
    alike = [other for other, module in model.named_modules() if type(module) is kind and other]
    return [other for other in alike if other == path or not _obstacle(model, other)]


def _obstacle(model: nn.Module, path: str) -> str:
    """Why a module may not become a leaf by itself; empty if it may."""
    module = model.get_submodule(path)
    for name, value in vars(module).items():
        if "layerdrop" in name.lower().replace("_", "") and isinstance(value, float) and value > 0:
            return f"{path}.{name} is {value}, so that it skips layers at random; set it to 0."
    if any(isinstance(inner, CutPoint) for inner in module.modules()):
        return f"The module {path!r} holds CutPoints, so it cannot become an opaque leaf."
    share = _num_elements(module) / max(_num_elements(model), 1)
    if share > LARGEST_LEAF_SHARE:
        return f"The module {path!r} holds {share:.0%} of the parameters, too much for an opaque leaf."
    return ""


def _num_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def as_error(error: Exception, model: nn.Module) -> CaptureError:
    """What stopped capture, as an error for the user."""
    lost = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.is_meta
    ]
    if lost:
        return CaptureError(
            f"{what_happened(error, model)} The model was built on the meta device and "
            f"has plain "
            f"tensor attributes without values: {', '.join(lost)}. Make them buffers with register_buffer."
        )
    return CaptureError(f"{what_happened(error, model)} {WAYS_OUT}")


def what_happened(error: Exception, model: nn.Module) -> str:
    """In which module and at which line capture stopped, and why."""
    blame = find_blame(error, model)
    inside = f" (in module {blame.modules[-1]!r})" if blame.modules and blame.modules[-1] else ""
    if is_data_dependent(error):
        return (
            f"The model's forward decides by the values of tensors{inside}, which a graph cannot hold, at "
            f"{blame}."
        )
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"The model's forward{inside} cannot be captured: {type(error).__name__}: {first_line}, at {blame}."
