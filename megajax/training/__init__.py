"""Training: configuration, optimizers, the one train step, evaluation, and the loop around them."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "config": (
            "CheckpointConfig",
            "Config",
            "EvalConfig",
            "JobConfig",
            "LogConfig",
            "ProfileConfig",
            "TrainConfig",
        ),
        "detection": ("DetectConfig", "coco_ap", "voc_ap"),
        "loop": ("Run", "train"),
        "masking": ("PruneConfig",),
        "scores": ("logprobs",),
        "optim": ("OptimConfig", "Optimizer", "make_optimizer"),
        "step": ("JointStep", "TrainStep", "joint", "make_train_step"),
        "task": (
            "Leaf",
            "Task",
            "mean_loss",
            "mean_metrics",
            "plain_task",
            "token_rows",
            "TrainState",
        ),
    },
)
