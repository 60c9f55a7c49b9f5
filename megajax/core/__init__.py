"""Ground floor: configuration, mesh, layout, trees of arrays, hardware cards."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "axes": ("Rules",),
        "config": (
            "Checked",
            "define_flags",
            "from_flags",
            "option",
            "Limits",
        ),
        "errors": ("UserError",),
        "hardware": (
            "Cluster",
            "DeviceCard",
            "Link",
            "MixedCluster",
            "find_card",
            "parse_cluster",
            "parse_mixed",
        ),
        "layout": ("Layout",),
        "mesh": ("MeshSpec", "make_mesh"),
    },
)
