"""What a run says about itself: one stream of records, and where it goes."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "heartbeat": ("Heartbeat",),
        "meter": ("Meter", "Work"),
        "records": ("Record", "Recorder", "Sink"),
        "reports": ("Action", "HostReport", "RankReport"),
        "sinks": ("Jsonl", "TensorBoard", "Wandb"),
    },
)
