"""Whole networks and their name maps. They know no mesh and no PartitionSpec."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "decoder": ("Decoder",),
        "decoder_config": ("DecoderConfig",),
        "encoder": ("Encoder",),
        "encoder_config": ("EncoderConfig",),
        "faster_rcnn": ("FasterRcnnConfig", "detector"),
        "parts": ("ModelParts", "as_tower", "of_loss", "of_module"),
        "vit": ("VitConfig",),
        "vlm": ("VlmConfig",),
    },
)
