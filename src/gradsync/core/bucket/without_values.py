"""What can be asked of a tensor without a look at its values: properties by their getters, and methods.

Subclasses that stand for values which are not there, or are somebody else's, answer these as ever.
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
