"""Ground floor: configuration, mesh, layout, trees of arrays, hardware cards."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "config": ("Checked", "define_flags", "from_flags", "option"),
        "errors": ("UserError",),
        "hardware": ("Cluster", "DeviceCard", "Link", "find_card", "parse_cluster"),
        "layout": ("Layout",),
        "limits": ("Limits",),
        "mesh": ("MeshSpec", "make_mesh"),
        "rules": ("Rules",),
    },
)
