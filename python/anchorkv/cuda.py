"""Attention over compressed segments on a GPU, for torch tensors; where the package was built with CUDA.

    pip install . -C cmake.define.ANCHORKV_ENABLE_CUDA=ON
"""

import torch

from . import _core

available = _core.has_cuda


def attend(queries, segments, tail_keys=None, tail_values=None, *, scale=None, out=None, lse=None):
    """anchorkv.attend for CudaSegments (Segment.cuda) and CUDA tensors of float32, float16 or bfloat16.

    queries: [q_heads, n, head_dim] after RoPE. tail_keys, tail_values: [kv_heads, rows, head_dim], keys after RoPE; the
    last n rows are the queries' own tokens. Work is enqueued on the current stream; nothing waits. Returns out,
    [q_heads, n, head_dim] of the queries' type if none is given. lse: optional [2, n, q_heads] float32, gets the
    largest logit and the sum of exponentials below it.
    """
    if not available:
        raise RuntimeError("this build of anchorkv has no CUDA: pip install . -C cmake.define.ANCHORKV_ENABLE_CUDA=ON")
    head_dim = queries.shape[2]
    if scale is not None and abs(scale * head_dim ** 0.5 - 1) > 1e-6:
        # The kernels divide logits by sqrt(head_dim).
        queries = queries * (scale * head_dim ** 0.5)
    if out is None:
        out = torch.empty_like(queries)
    none = (0, "float32", 0, 0, 0, 0)
    _core._attend_cuda(segments, head_dim, rows(queries), none if tail_keys is None else rows(tail_keys),
                       none if tail_values is None else rows(tail_values), rows(out), 0 if lse is None else lse.data_ptr(),
                       torch.cuda.current_stream(queries.device).cuda_stream)
    return out


NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def rows(tensor):
    heads, count, dim = tensor.shape
    head_stride, row_stride, element_stride = tensor.stride()
    if not tensor.is_cuda or tensor.dtype not in NAMES or (element_stride != 1 and dim > 1):
        raise ValueError(f"a {tensor.dtype} tensor on {tensor.device} with strides {tensor.stride()}; it must be on the GPU, of float32, "
                         "float16 or bfloat16, with a contiguous last axis")
    return tensor.data_ptr(), NAMES[tensor.dtype], heads, count, head_stride, row_stride
