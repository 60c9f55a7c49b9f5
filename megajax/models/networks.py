"""Which network a configuration describes: the modules of its parts and of its Hugging Face names.

Engines, samplers, checkpoints and foreign files take a network by the type of its configuration,
from this one place. A new kind of network is a line in `NETWORKS`.
"""

from typing import Any

from megajax.models import decoder, encoder, encoder_names, names, vlm, vlm_names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.vlm import VlmConfig

# {type of the configuration: (module with `parts`, module with the rules of its names)}
NETWORKS: dict[type, tuple[Any, Any]] = {
    DecoderConfig: (decoder, names),
    EncoderConfig: (encoder, encoder_names),
    VlmConfig: (vlm, vlm_names),
}


def network_of(cfg: Any) -> Any:
    """Returns the module whose `parts(cfg, ...)` is the network.

    Raises: KeyError for a configuration of no network here.
    """
    return NETWORKS[type(cfg)][0]


def names_of(cfg: Any) -> Any:
    """Returns the module that maps the network's parameters to Hugging Face's names."""
    return NETWORKS[type(cfg)][1]
