"""Pipeline schedules: who computes what in which tick, how long it takes, where it idles."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "build": ("gpipe", "interleaved", "one_f_one_b", "zero_bubble"),
        "ir": ("Kind", "Lane", "Table", "Task", "Timeline"),
        "simulator": ("simulate",),
    },
)
