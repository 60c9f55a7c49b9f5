"""What a run says about itself: one stream of records, and where it goes."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "alerts": ("Action", "Alert"),
        "detectors": ("Detector", "Rule"),
        "grid": ("Grid", "to_grid"),
        "heartbeat": ("Heartbeat",),
        "job": ("Job", "Limits"),
        "meter": ("Meter", "Work"),
        "quality": ("Quality",),
        "records": ("Record", "Recorder", "Sink"),
        "samples": ("Samples", "concat"),
        "sinks": ("Jsonl", "Prometheus", "TensorBoard", "Wandb"),
    },
)
