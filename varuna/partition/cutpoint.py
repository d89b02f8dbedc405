"""``CutPoint``: the user's mark of a place where the model may be divided.

In plain PyTorch it is the identity: no parameters, no buffers, no state. While the model is exported it calls
the custom operator ``varuna::cut_point`` so that the mark stays visible in the captured graph; a pure identity
would leave nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from varuna.errors import CutPointError


@torch.library.custom_op("varuna::cut_point", mutates_args=())
def cut_point_op(x: Tensor, mark: int) -> Tensor:
    """A copy of ``x`` (a custom operator may not return its input); ``mark`` tells instances apart."""
    return x.clone()


@cut_point_op.register_fake
def _(x: Tensor, mark: int) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


cut_point_op.register_autograd(_backward)


class CutPoint(nn.Module):
    """Marks the place between what happens before and after this call in ``forward``.

    ::

        x = self.cut(x)    # self.cut = varuna.CutPoint()

    Every instance may be called once per forward: a second place needs a second ``CutPoint``. Other tensors
    that are alive at the mark (skip connections, masks) cross it without being passed.

    Raises:
        CutPointError: called with something that is not one tensor.
    """

    def forward(self, x: Tensor) -> Tensor:
        """The tensor itself; shape, dtype and gradient unchanged."""
        if not isinstance(x, Tensor):
            raise CutPointError(
                f"CutPoint takes one tensor, got {type(x).__name__}. Pass the main tensor only, e.g. "
                f"`h = self.cut(h)`; everything else that is alive there crosses the cut by itself."
            )
        if torch.compiler.is_exporting():
            # The exporter hands out stand-ins for submodules; they share the module's own attribute dict.
            marked: Tensor = cut_point_op(x, id(vars(self)))
            return marked
        return x
