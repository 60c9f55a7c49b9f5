"""A simulated training fleet: per-second metrics of many machines, with faults that are known."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "faults": (
            "Fault",
            "draw_fault",
            "KINDS",
            "MIXES",
            "Disturbance",
            "Move",
            "METRICS",
            "Spec",
        ),
        "roles": (
            "Layout",
            "Setting",
        ),
        "simulator": (
            "Fleet",
            "Case",
            "Family",
            "FAMILIES",
            "cases",
        ),
    },
)
