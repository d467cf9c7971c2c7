"""A backward that fails where a test wants it to."""

from typing import Any

import torch

__all__ = ["Explosion", "Fuse"]


class Explosion(Exception):  # noqa: N818 (it is thrown by a test)
    pass


class Fuse(torch.autograd.Function):
    """Raises in its backward, where it is lit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lit: bool) -> torch.Tensor:
        ctx.lit = lit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.lit:
            raise Explosion("in backward")
        return grads[0], None
