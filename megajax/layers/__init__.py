"""Parts of networks. They know logical words only; communication and kernels enter through Ops."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "attention": (
            "Attention",
            "AttentionConfig",
            "Cache",
            "Context",
            "RopeConfig",
        ),
        "losses": ("LossSums", "cross_entropy", "token_logprobs"),
        "mlp": ("MlpConfig", "Mlp"),
        "moe": ("Moe", "MoeConfig"),
        "norm": ("Norm",),
        "ops": ("Ops",),
        "sparse": ("SparseKernel",),
    },
)
