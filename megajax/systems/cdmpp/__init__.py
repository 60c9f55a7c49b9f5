"""CDMPP (arXiv 2311.09690): predicts how long a program takes on a device it has not run on."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "dataset": (
            "Dataset",
            "choose",
        ),
        "predictor": ("FarFromTraining", "Predictor"),
    },
)
