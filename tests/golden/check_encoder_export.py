"""Compares the logits of an exported encoder with those of transformers.

In the environment of megajax, for a folder of `scripts/hf.py export`:

    python tests/golden/check_encoder_export.py ours FOLDER LOGITS.npz

and then in an environment of its own with torch and transformers, as make_hf.py:

    hf/bin/python tests/golden/check_encoder_export.py theirs FOLDER LOGITS.npz

The second prints one JSON object: the class of transformers that loaded the folder, the names of
its classes, the largest logit and the largest difference. It fails above 1e-4.
"""

import json
import sys

import numpy as np

LENGTHS = np.array([12, 7, 1], np.int32)


def ours(folder: str, file: str) -> None:
    """Writes tokens and our logits of an exported folder."""
    from megajax.foreign import hf
    from megajax.layers.ops import Ops
    from megajax.models import encoder

    cfg, params = hf.load(folder)
    tokens = np.random.default_rng(0).integers(2, cfg.vocab, (3, 12)).astype(np.int32)
    run = encoder.classify if cfg.head == "classify" else encoder.logits
    logits = run(encoder.parts(cfg, ops=Ops()), params, {"tokens": tokens}, LENGTHS)
    logits = np.asarray(logits)[..., : cfg.labels if cfg.head == "classify" else cfg.vocab]
    np.savez(file, tokens=tokens, logits=logits)


def theirs(folder: str, file: str) -> None:
    """Loads the folder with transformers and compares."""
    import torch
    import transformers

    with np.load(file) as held:
        tokens, golden = torch.tensor(held["tokens"]).long(), held["logits"]
    kinds = transformers.AutoConfig.from_pretrained(folder).architectures
    kind = getattr(transformers, kinds[0])
    model, report = kind.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report  # no weight was missing, left over or of another shape
    live = torch.arange(tokens.shape[1])[None] < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        logits = model.eval()(tokens, attention_mask=live.long()).logits.numpy()
    if logits.ndim == 3:
        logits, golden = logits[live.numpy()], golden[live.numpy()]
    worst = float(np.abs(logits - golden).max())
    print(
        json.dumps(
            {
                "class": kinds[0],
                "id2label": model.config.id2label,
                "largest": float(np.abs(logits).max()),
                "difference": worst,
            }
        )
    )
    assert worst < 1e-4


if __name__ == "__main__":
    {"ours": ours, "theirs": theirs}[sys.argv[1]](*sys.argv[2:])
