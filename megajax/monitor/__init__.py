"""What a run says about itself: one stream of records, and where it goes."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "alerts": ("Action", "Alert"),
        "detectors": (
            "Detector",
            "Rule",
            "Job",
            "Limits",
        ),
        "heartbeat": ("Heartbeat",),
        "meter": ("Meter", "Work"),
        "records": (
            "Record",
            "Recorder",
            "Sink",
            "Jsonl",
            "Prometheus",
            "TensorBoard",
            "Wandb",
        ),
        "samples": (
            "Samples",
            "concat",
            "Grid",
            "to_grid",
            "Quality",
        ),
    },
)
