"""A simulated training fleet: per-second metrics of many machines, with faults that are known."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "case_sets": ("Case", "Family", "FAMILIES", "cases"),
        "disturbances": ("Disturbance", "Move"),
        "faults": ("Fault", "draw_fault"),
        "kinds": ("KINDS", "MIXES"),
        "roles": ("Layout",),
        "settings": ("Setting",),
        "simulator": ("Fleet",),
        "specs": ("METRICS", "Spec"),
    },
)
