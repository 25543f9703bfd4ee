"""Compressed KV caches: several times smaller, attended without decompressing. docs/python.md.

`compress`, `Segment`, `attend`, `KvCache` and `estimate` work on arrays; `anchorkv.hf` has a cache for transformers,
`anchorkv.kvpress` a press, `anchorkv.lmcache` a serde, `anchorkv.report` pages of evaluation results.
"""

try:
    from ._core import (
        Error,
        KvCache,
        Rope,
        Segment,
        __version__,
        attend,
        compress,
        estimate,
        from_bytes,
        load,
        load_with_note,
        save,
        set_threads,
        to_bytes,
    )
except ImportError as error:
    # In the source tree, where only the reports run; they need no compiled module.
    if getattr(error, "name", None) != f"{__name__}._core":
        raise
    __all__ = []
else:
    __all__ = [
        "Error", "KvCache", "Rope", "Segment", "__version__", "attend", "compress", "estimate", "from_bytes", "load", "load_with_note", "save",
        "set_threads", "to_bytes",
    ]
