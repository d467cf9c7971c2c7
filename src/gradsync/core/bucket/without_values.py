"""The tensor properties (by their getters) and methods that do not read values.

Subclasses that stand for values that are absent, or that belong to something else, answer these as usual.
"""

import torch

__all__ = ["WITHOUT_VALUES"]

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "grad", "grad_fn", "is_leaf", "requires_grad"),
    *("is_cpu", "is_cuda", "is_sparse", "is_mkldnn", "is_nested", "is_quantized"),
)

WITHOUT_VALUES = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.stride, torch.Tensor.nelement),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.requires_grad_),
        *(torch.Tensor.element_size, torch.Tensor.is_contiguous, torch.Tensor.__len__),
    }
)
