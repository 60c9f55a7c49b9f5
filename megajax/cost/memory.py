"""Bytes that a device holds at the peak of a step, by term: a lower bound for any compiled program.

The terms of training state (parameters, optimizer, gradients) are exact, except that pruning adds
1 byte of mask and 4 bytes of importance for each weight that it may prune. The other terms count
only what must exist at the same time: the stash (what the forward pass of every layer keeps for the
backward pass), the weights in use, and the larger of one block's working set and one chunk of
logits. A step of generation has a cache of keys and values instead of gradients, moments and a
stash. Fragmentation, communication buffers and unfused operations need more memory; compiling
the step for a GPU that is not there shows how much (systems/aot.py).

Sources: models/parts.py:remat_policy (what is kept); Megatron-LM (arXiv 2104.04473) section 3 and
2205.05198 for the terms; training in float32 masters with a 16-bit compute dtype.
"""

import dataclasses

from megajax.cost.base import ITEMSIZE
from megajax.cost.kernels import PatchEmbedding
from megajax.cost.step import MOMENTS, StepShape

MASTER = 4  # bytes of float32 masters, gradients and moments
# Bytes for each pair of a query and a key: XLA's attention keeps the softmax in float32 for its
# gradient, beside its value in the compute type (read in programs compiled for H100, jax 0.11.2).
SOFTMAX = 4
# Arrays as large as a tower's residual stream that its projector keeps: the norm of the blocks'
# result, and its inner values before and after the activation (models/vlm.py). The result itself
# counts as one more sublayer, whose norm is an operation of the workload.
_PROJECTOR = 3


def terms(step: StepShape) -> dict[str, float]:
    """Returns {term: bytes a device}. Their sum, with the smaller of activations and logits left
    out, is `bound`."""
    if step.load.towers:
        return _with_towers(step)
    if not step.trains:
        # The memory of a prefill or of a decoded token, by what it is for. Parameters rest in the
        # compute type, or as training leaves them where ZeRO cuts them (megajax/serving/engine.py,
        # zero).
        cut = step.ways(*step.zero_axes, *step.expert_zero_axes) > 1
        spread = step.pieces * step.ways("tensor")
        cache = step.used.cache * ITEMSIZE[step.load.dtype] / spread
        return {
            "parameters": (MASTER if cut else step.itemsize) * held(step),
            "weights in use": _weights_in_use(step) if cut else 0.0,
            "cache": cache,
            "activations": max(_block(step), _experts(step)) / 2,  # no gradients beside them
            "logits": _logits(step) / 2,
            "batch": 2 * 4 * step.rows * step.load.seq_len,
        }
    tables = step.load.table_params / (step.ways("pipe", "tensor") * step.ways(*step.zero_axes))
    moments, params = MOMENTS[step.optimizer] + step.averages, held(step)
    adam_tables = tables if step.optimizer == "muon" else 0.0  # Adam's second moment for them
    errors = step.coding.error_bits / 8 * gathered(step) if step.coding else 0.0
    return {
        "parameters": MASTER * params,
        **({"errors": errors} if errors else {}),
        "optimizer": MASTER * (moments * params + adam_tables),
        "gradients": MASTER * _gradients(step),
        "weights in use": _weights_in_use(step),
        "stash": _stash(step),
        "activations": max(_block(step), _experts(step)),
        "logits": _logits(step),
        "batch": 4 * 4 * step.rows * step.micro_steps * step.load.seq_len / step.ways("context"),
    }


def _with_towers(step: StepShape) -> dict[str, float]:
    """The terms of a step whose first operation is one of towers.

    What a tower keeps for the backward pass lies beside what the blocks keep; in a pipeline, the
    tower runs again when its micro-batch leaves, and what it keeps exists then only. Its working
    set and the weights of a layer never exist together with those of a block. A frozen tower keeps
    nothing but what its projector reads, if that is trained.
    """
    sizes, piped = terms(step.trunk), step.pipeline.stages > 1
    for tower in step.towers:
        alone = terms(tower)
        trained = tuple(op for op in tower.load.ops if not op.frozen)
        is_frozen = len(trained) < len(tower.load.ops)
        learned = alone
        if is_frozen and step.trains:
            load = dataclasses.replace(tower.load, ops=trained)
            learned = terms(dataclasses.replace(tower, load=load)) if trained else {}
        embeddings = [
            (kernel, op.count)
            for op in tower.load.ops
            if isinstance(kernel := op.kernel, PatchEmbedding)
        ]
        # Pixels in bytes, and three numbers for the place of each patch.
        read = sum(kernel.sizes[0] + 3 * 4 * kernel.tokens for kernel, _ in embeddings)
        sizes["batch"] += read * step.micro_steps / tower.pieces
        sizes["parameters"] += alone["parameters"]
        for name in {"errors", "optimizer", "gradients"} & learned.keys():
            sizes[name] = sizes.get(name, 0.0) + learned[name]
        if step.resident or piped:
            sizes["weights in use"] += alone["weights in use"]
        else:
            sizes["weights in use"] = max(sizes["weights in use"], alone["weights in use"])
        stash = 0.0
        if step.trains and is_frozen:
            stash = (1 + _PROJECTOR) * residual(tower) if trained else 0.0
        elif step.trains:
            pixels = sum(kernel.sizes[0] * frames for kernel, frames in embeddings) / tower.pieces
            pixels *= step.itemsize / step.ways("tensor")
            stash = alone["stash"] + pixels + _PROJECTOR * residual(tower)
        if not piped:
            sizes["stash"] = sizes.get("stash", 0.0) + stash
        # The products after an activation, too, which a tower's memory is mostly made of: without
        # them the terms grow 10 % slower with the patches than compiled programs (H100, 8 layers).
        after = tower.used.output_width - tower.used.attention_width
        inner = step.itemsize * tower.tokens * after / step.ways("tensor")
        values = alone["activations"] / (2 if is_frozen and step.trains else 1)
        working = values + inner + (stash if piped else 0.0)
        sizes["activations"] = max(sizes["activations"], working)
    return sizes


def _gradients(step: StepShape) -> float:
    """Returns how many elements of gradients one device holds at the peak.

    If weights are resident, the full sums exist together with the rank's pieces of them while they
    are exchanged; if gradients are sent layer by layer (`StepShape.streams`), only the sums of one
    layer and of the tables do.
    """
    if step.streams:
        layer = (layer_weights(step) + expert_weights(step)) / step.itemsize
        return held(step) + layer + step.load.table_params / step.ways("tensor")
    if step.resident:
        return gathered(step) + held(step)
    if not step.local_gradients:
        return held(step)
    # While a pipeline's last chunk is computed, the sums of the one before are on their way, apart
    # from those of all chunks, and those of the others have arrived.
    chunks = step.pipeline.chunks
    moving = gathered(step) / chunks + (1 - 2 / chunks) * held(step)
    return gathered(step) + (moving if step.pipeline.hides and chunks > 1 else 0.0)


def bound(sizes: dict[str, float]) -> float:
    """Returns the least memory that these terms allow: block and head do not run together."""
    return sum(sizes.values()) - min(sizes["activations"], sizes["logits"])


def misfit(sizes: dict[str, float], capacity: float) -> str | None:
    """Returns the largest term of a step that does not fit, or None when it does."""
    return max(sizes, key=lambda term: sizes[term]) if bound(sizes) > capacity else None


def held(step: StepShape) -> float:
    """Returns the parameters that rest on one device. Experts rest on their axis."""
    load = step.load
    everyone = (step.unshared_params + load.table_params) / step.ways(*step.zero_axes)
    experts = load.routed_params / (step.ways("expert") * step.ways(*step.expert_zero_axes))
    return (everyone + experts) / step.ways("pipe", "tensor")


def gathered(step: StepShape) -> float:
    """Returns the parameters that one device holds when its pieces are gathered over ZeRO axes."""
    load = step.load
    dense = step.unshared_params + load.table_params
    return (dense + load.routed_params / step.ways("expert")) / step.ways("pipe", "tensor")


def layer_weights(step: StepShape) -> float:
    """Returns the bytes of one layer's matrices in the compute dtype, gathered over ZeRO axes; of
    routed experts none."""
    # A pipeline gathers what its ranks store; others cut out their key-value head first.
    stored = step.pipeline.stages > 1
    dense = step.unshared_params if stored else step.used.dense_params
    return step.itemsize * dense / step.load.stored_layers / step.ways("tensor")


def expert_weights(step: StepShape) -> float:
    """Returns the bytes of one layer's routed experts of one device, gathered over ZeRO axes."""
    layer = step.itemsize * step.load.routed_params / step.load.stored_layers
    return layer / step.ways("expert", "tensor")


def residual(step: StepShape) -> float:
    """Returns the bytes of one micro-batch's residual stream, cut over tensor too."""
    return step.itemsize * step.tokens * step.load.width / step.ways("tensor")


def slotted(step: StepShape) -> float:
    """Returns the rows that one device's tokens fill at all experts of a layer (capacity mode)."""
    routed, seq_len = step.load.routed, step.load.seq_len
    if routed is None or routed.dropless:
        return 0.0
    slots = routed.pairs * seq_len / routed.experts
    return routed.experts * step.rows * min(slots, seq_len / step.ways("context"))


def _weights_in_use(step: StepShape) -> float:
    if step.resident:
        return step.itemsize * gathered(step)
    layer = layer_weights(step) + expert_weights(step)
    if step.pipeline.stages > 1:  # gathered once a step and kept (ZeRO-2, MegaScale section 3.2)
        return layer * step.stored_layers if step.ways(*step.zero_axes) > 1 else 0.0
    tables = step.load.table_params if step.exchanges else step.load.head_params
    return layer + step.itemsize * tables / step.ways("tensor")


def _layer_stash(step: StepShape) -> float:
    """What the backward pass keeps of one layer of one micro-batch, its input included."""
    work, cut = step.used, step.itemsize / step.ways("tensor")
    # The attention's result, input of the MLP; in a network of convolutions there is none.
    first = max(work.sublayers - 1, 0) * residual(step)
    more = {
        "full": 0.0,
        "outputs": first + cut * step.tokens * work.attention_width,
        "dots": first + cut * step.tokens * (work.input_width + work.attention_width),
        "none": first
        + cut * step.tokens * (work.input_width + work.output_width)
        + (layer_weights(step) if step.ways(*step.zero_axes) > 1 and not step.exchanges else 0.0)
        + (_weights_of_attention(step, SOFTMAX + step.itemsize) if step.keeps_attention else 0.0)
        + _experts(step, backward=False),
    }
    convolved = sum(
        op.kernel.sizes[-1] * op.count / step.micro_steps
        for op in step.forward.ops
        if op.part in ("convolution", "pooling")
    )
    return residual(step) + step.itemsize * convolved / step.layers + more[step.remat]


def _stash(step: StepShape) -> float:
    pipeline = step.pipeline
    if pipeline.stages == 1:
        return step.layers * _layer_stash(step)
    # The program keeps the inputs of chunks in a buffer. Its size does not depend on the number of
    # micro-batches unless all forward passes come first (gpipe). One place is for values that no
    # stage needs. With stash='residuals', a second buffer keeps what rematerialisation keeps of the
    # layers; otherwise this exists for one chunk only, in its backward pass.
    places = pipeline.live_inputs + 1
    chunks = places if pipeline.stash == "residuals" else 1
    return places * residual(step) + chunks * step.layers / pipeline.chunks * _layer_stash(step)


def _weights_of_attention(step: StepShape, itemsize: float) -> float:
    kernel = step.load.attention
    if kernel is None:
        return 0.0
    queries = step.tokens * kernel.heads / step.ways("tensor")
    return itemsize * queries * kernel.keys


def _block(step: StepShape) -> float:
    """The backward pass of one block: its gathered input, its inner values, and their gradients."""
    inner = step.itemsize * step.tokens * step.used.input_width / step.ways("tensor")
    gathered_input = step.itemsize * step.tokens * step.load.width
    attention = 0.0
    if not step.fused_attention:
        # The gradient of the softmax, and unless the stash has them, its values in both types. A
        # ring works on the keys of one device at a time, and computes them again.
        size = step.itemsize
        if step.remat != "none" or not step.keeps_attention:
            size += SOFTMAX + step.itemsize
        blocks = 1 if step.keeps_attention else step.ways("context")
        attention = _weights_of_attention(step, size) / blocks
    return 2 * gathered_input + 2 * inner + attention


def _experts(step: StepShape, backward: bool = True) -> float:
    """Returns the bytes of a layer's routed experts: rows read, inner values and results.

    In the backward pass with a fixed capacity, each of these arrays exists together with its
    gradient. Without one, grouped kernels are used, whose operands and results XLA can free one by
    one. The peak is then the larger of two moments: all values and the gradient of the results, or
    the rows and the inner values of the first products with their gradients.
    """
    routed = step.load.routed
    if routed is None:
        return 0.0
    # Without a fixed capacity there is room for every token of the `expert` axis at every expert
    # of this device that the token may use.
    most = min(routed.top_k, routed.experts / step.ways("expert"))
    slots = slotted(step)
    rows = step.itemsize * (slots or step.tokens * step.ways("expert") * most)
    hidden = routed.hidden / step.ways("tensor")
    into = (1 + routed.gated) * hidden
    values = 2 * routed.width + into + hidden
    if not backward:
        return rows * values
    return rows * (2 * values if slots else max(values + routed.width, routed.width + 2 * into))


def _logits(step: StepShape) -> float:
    """float32 logits of one chunk of the loss and their gradient."""
    spread = step.pieces * step.ways("context", "tensor", "pipe")
    return 2 * 4 * step.load.scores / step.loss_chunks / spread


def size(nbytes: float) -> str:
    """Returns bytes as GiB, or as MiB below a tenth of one."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 / 10 else f"{nbytes / 2**20:.2f} MiB"
