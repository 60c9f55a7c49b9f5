"""Hugging Face folders whose Linears are in few bits: GPTQ and AWQ files, in and out.

A Linear in few bits becomes a QuantKernel (quantized_linear.py); a quantized head is dequantized.
What is not quantized there (embeddings, norms, some Linears) is read and written as
checkpoint/hf.py does. Layers whose matrices have unlike bits or groups, or of which one is dense,
become several runs (core.packed.LayerRuns); in GPTQ's form they are the member `dynamic` of
quantization_config (formats/quantization_config.py).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint import hf, quantized_linear
from megajax.checkpoint.formats import quantization_config
from megajax.checkpoint.formats.quantization_config import SECTION, Form, Settings
from megajax.checkpoint.formats.safetensors import INDEX, SINGLE, TensorFolder
from megajax.checkpoint.quantized_linear import Linear
from megajax.core import files as files_
from megajax.core.errors import UserError
from megajax.core.packed import LayerRuns, runs_of
from megajax.core.paths import expand
from megajax.core.tree import Tree, is_words, named_leaves, nest
from megajax.data.tokenizer import Tokenizer
from megajax.models import decoder, names
from megajax.models.decoder_config import DecoderConfig
from megajax.models.name_rules import Rule, Sizes
from megajax.quant.formats import Format
from megajax.quant.kernel import QuantKernel
from megajax.quant.qtensor import QTensor
from megajax.quant.quantized_model import inputs_of, matrices

HEAD = "head"
# Settings before transformers read GPTQ and AWQ: AutoGPTQ's file, and AutoAWQ's, whose members
# (w_bit, q_group_size) some folders have in a file of the first name.
OLDER = ("quantize_config.json", "quant_config.json")


def settings(path: str | Path, flag: str = "hf") -> Settings | None:
    """Returns what a folder's config.json says of its codes; None: it is not quantized.

    If config.json says nothing, a file of OLDER is read.
    Raises: UserError for a form that is not supported, and for several such files.
    """
    file = expand(path) / "config.json"
    found = files_.read_object(file, hf.MAX_CONFIG, flag).get(SECTION)
    older = [p for name in OLDER if found is None and (p := file.with_name(name)).is_file()]
    if len(older) > 1:
        raise UserError(
            f"{file.parent} has {' and '.join(OLDER)}, and config.json has no {SECTION} to say "
            f"which of them counts; move one away (--{flag})"
        )
    if older:
        file = older[0]
        found = files_.read_object(file, hf.MAX_CONFIG, flag)
        if found.get("quant_method") is None:
            is_awq = file.name == OLDER[1] or "w_bit" in found
            found |= {"quant_method": "awq" if is_awq else "gptq"}
    if found is None:
        return None
    if not isinstance(found, dict):
        raise UserError(f"{file}: {SECTION} must be an object")
    try:
        return quantization_config.checked(found)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def load(path: str | Path) -> tuple[DecoderConfig, Tree]:
    """Returns (configuration, parameters) of a folder in GPTQ's or AWQ's form, on one device.

    Raises: UserError for forms that are not supported (groups of unlike sizes in one matrix; other
        methods; experts), and for a folder that is incomplete or damaged.
    """
    folder, given = expand(path), settings(path)
    if given is None:
        raise UserError(f"{folder}/config.json has no {SECTION}; checkpoint.hf reads it")
    cfg = hf.load_decoder_config(path, "hf")
    if cfg.moe.experts:
        raise UserError(
            f"{folder} is a model with experts in few bits ({given.method}), which is not "
            "supported; models without experts are"
        )
    found = _Folder(TensorFolder(folder, _single_file(folder)), given, cfg)
    leaves = {rule.ours: found.leaf(rule) for rule in names.rules(cfg)}
    found.check_all_used()
    stack = decoder.parts(cfg).stack
    return cfg, nest(_in_runs(leaves, stack, cfg.layers))


def _single_file(folder: Path) -> str:
    """Returns the name of the file that has all tensors: model.safetensors, or the only one that
    ends so. AutoGPTQ called it gptq_model-4bit-128g.safetensors, and other programs as they liked.

    Raises: UserError for none and for several, if no index lists them.
    """
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        return SINGLE
    names = sorted(p.name for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if len(names) == 1:
        return names[0]
    rule = f"{folder} has neither {SINGLE} nor {INDEX}"
    if names:
        raise UserError(
            f"{rule}, but {len(names)} other files of weights: {', '.join(names[:8])}; leave only "
            "the one that has all tensors (--hf)"
        )
    pickles = sorted(p.name for end in ("bin", "pt", "pth") for p in folder.glob(f"*.{end}"))
    more = f"; codes are not read from {', '.join(pickles[:8])}" if pickles else ""
    raise UserError(f"{rule}, nor another file of safetensors{more} (--hf)")


class _Folder:
    """The tensors of a folder, as leaves."""

    def __init__(self, files: TensorFolder, given: Settings, cfg: DecoderConfig):
        """Reads nothing yet."""
        self._files, self._given, self._cfg = files, given, cfg
        self._sizes: Sizes = names.sizes(cfg)
        self._quantized = set(matrices(cfg.axes))
        self._abstract = dict(named_leaves(decoder.parts(cfg).abstract))
        self._words = dict(named_leaves(cfg.axes, is_words))
        self._used: set[str] = set()

    def leaf(self, rule: Rule) -> Any:
        """Returns an array (stacked over the layers, if it has any), or a list of each layer's leaf
        for a matrix that may be quantized."""
        like = self._abstract[rule.ours]
        stack = [rule.name(index) for index in np.ndindex(*rule.stack(self._sizes))]
        if rule.ours not in self._quantized:
            out = np.zeros(like.shape, np.float32)
            flat = out.reshape(-1, *like.shape[len(rule.stack(self._sizes)) :])
            for place, name in enumerate(stack):
                part = self._dense(rule, name)
                flat[(place, *(slice(0, n) for n in part.shape))] = part
            return jnp.asarray(out)
        shape = like.shape[1:]
        found = [self._linear(rule, name, shape) for name in stack]
        ordered = any(isinstance(x, Linear) and x.order_K is not None for x in found)
        return [
            x.kernel(shape, ordered) if isinstance(x, Linear) else jnp.asarray(x) for x in found
        ]

    def _linear(self, rule: Rule, name: str, shape: tuple[int, ...]) -> Linear | np.ndarray:
        """Returns a layer's matrix: codes, or a dense array."""
        if (stem := self._stem(name)) is None:
            return np.array(self._dense(rule, name), np.float32)
        K = inputs_of(self._words[rule.ours][1:], shape)
        N = int(np.prod(shape)) // K
        parts = 1 if rule.part is None else self._sizes["3"]
        found = self._read(stem, K, parts * N)
        return found if rule.part is None else found.columns(rule.part * N, (rule.part + 1) * N)

    def _stem(self, name: str) -> str | None:
        """Returns what the tensors of a quantized Linear begin with; None: it is dense."""
        stems = [n.removesuffix(".weight") for n in names.spellings(name)]
        return next((s for s in stems if quantized_linear.names_of(self._files, s)), None)

    def _read(self, stem: str, K: int, N: int) -> Linear:
        self._used |= set(quantized_linear.names_of(self._files, stem))
        return quantized_linear.read(self._files, stem, self._given, K, N)

    def _dense(self, rule: Rule, name: str) -> np.ndarray:
        """Returns a tensor in our order of dimensions."""
        wanted = rule.their_shape(self._sizes)
        if rule.ours == HEAD and (stem := self._stem(name)) is not None:
            return rule.to_ours(self._read(stem, wanted[1], wanted[0]).dense().T, self._sizes)
        stored = next((n for n in names.spellings(name) if n in self._files), name)
        view = self._files.view(stored)
        self._used.add(stored)
        hf.check_tensor(self._files, stored, wanted)
        return rule.to_ours(view, self._sizes)

    def check_all_used(self) -> None:
        """Raises: UserError for tensors that nobody read."""
        self._used |= hf.equal_copies(self._files, self._cfg)
        strangers = [
            n
            for n in self._files.names()
            if n not in self._used
            and not names.is_needless(n, self._cfg)
            and not _is_empty_bias(self._files, n)
        ]
        if strangers:
            raise UserError(
                f"{self._files.folder} has tensors that this form does not know: {strangers[:5]}"
            )


def _is_empty_bias(files: TensorFolder, name: str) -> bool:
    """Tells a bias of zeros, which some writers give every Linear."""
    return name.endswith(".bias") and not np.asarray(files.view(name)).any()


def _in_runs(leaves: Mapping[str, Any], stack: str, layers: int) -> dict[str, Any]:
    """Returns the leaves with layers stacked: as LayerRuns if layers have unlike formats."""
    each = {n: x for n, x in leaves.items() if isinstance(x, list)}
    alike = [jax.tree.structure([x[i] for x in each.values()]) for i in range(layers)]
    starts = [i for i in range(layers) if i == 0 or alike[i] != alike[i - 1]]

    def run(start: int, stop: int) -> dict[str, Any]:
        return {
            n: _stacked(x[start:stop]) if isinstance(x, list) else x[start:stop]
            for n, x in leaves.items()
            if n.startswith(f"{stack}.")
        }

    if len(starts) == 1:
        return {**leaves, **run(0, layers)}
    spans = itertools.pairwise([*starts, layers])
    stacks = tuple(nest(run(*span))[stack] for span in spans)
    ends = {n: x for n, x in leaves.items() if not n.startswith(f"{stack}.")}
    return ends | {stack: LayerRuns(stacks, tuple(starts), layers)}


def _stacked(layers: Sequence[Any]) -> Any:
    """Returns one leaf of consecutive layers. A QuantKernel's arrays are (layers, 1 piece, ...)."""
    if isinstance(layers[0], QuantKernel):
        return jax.tree.map(lambda *x: jnp.stack(x)[:, None], *layers)
    return jnp.stack(layers)


# ---- out


def check(cfg: DecoderConfig, fmt: Format, form: Form) -> None:
    """Refuses a format of which a form cannot hold all matrices: before they are quantized.

    Raises: UserError that names the first such matrix.
    """
    words, abstract = dict(named_leaves(cfg.axes, is_words)), decoder.parts(cfg).abstract
    shapes = {n: x.shape[1:] for n, x in named_leaves(abstract)}
    for n in matrices(cfg.axes):
        K = inputs_of(words[n][1:], shapes[n])
        quantized_linear.check_shape(n, fmt, K, int(np.prod(shapes[n])) // K, form)


def save(
    params: Tree,
    cfg: DecoderConfig,
    path: str | Path,
    tokenizer: str | Path | Tokenizer | None = None,
    *,
    form: Form = "gptq",
    licences: Sequence[Path] = (),
) -> None:
    """Writes a folder in GPTQ's form or AWQ's ('gemm').

    form: 'gptq' is GPTQ's second version, checkpoint_format 'gptq_v2'; 'gptq_v1' is the first,
    'gptq', whose zero points are stored less 1 and may not be 0.
    What is dense is written in float16. AWQ's form takes one format of 4 bits, beside dense
    matrices, and groups that divide the inputs. Scales of inputs (quant.awq) have no place in
    either form; models.folding puts them elsewhere.
    Raises: UserError for what the form cannot hold: scales that float16 does not hold, zero points
        that are no whole number of scales; and as `hf.save`.
    """
    if form not in get_args(Form):
        raise UserError(f"form={form!r} must be one of {', '.join(get_args(Form))} (--form)")
    if not isinstance(cfg, DecoderConfig):
        raise UserError(f"hf_quantized.save: cfg must be a DecoderConfig, got {type(cfg).__name__}")
    dense, rules, linears, singles = _parted(params, cfg)
    if not linears:
        raise UserError("no matrix is quantized; hf.save writes dense models")
    tensors, kinds, ordered, symmetric = {}, {}, False, True
    for stem, linear in linears.items():
        found = quantized_linear.tensors(stem, linear, form)
        tensors |= {f"{stem}.{end}": x for end, x in found.items()}
        fmt = linear.weight.format
        kinds[stem] = fmt.width, fmt.group
        ordered |= linear.order_K is not None
        symmetric &= quantized_linear.is_symmetric(linear.weight)
    if form == "awq" and len({group for _, group in kinds.values()}) > 1:
        raise UserError("AWQ's form has one size of groups for all matrices; GPTQ's takes several")
    still_dense = [n.removesuffix(".weight") for n in singles]
    members = names.to_hf_config(cfg, "float16") | {
        SECTION: quantization_config.written(
            form, kinds, still_dense, desc_act=ordered, symmetric=symmetric
        )
    }
    plain, produce = hf.tensors_of(dense, rules, cfg, "float16")
    kept = {n: (x.shape, "F16" if x.dtype == np.float16 else "I32") for n, x in tensors.items()}
    kept |= {n: (x.shape, "F16") for n, x in singles.items()}
    ready = tensors | singles
    hf.write(
        path, plain | kept, lambda n: ready[n] if n in ready else produce(n), members,
        tokenizer=tokenizer, licences=licences,
    )  # fmt: skip


def _parted(
    params: Tree, cfg: DecoderConfig
) -> tuple[dict[str, Any], list[Rule], dict[str, Linear], dict[str, np.ndarray]]:
    """Returns (whole leaves, their rules; {stem: Linear}; {name: dense Linear of a block})."""
    stack, sizes = decoder.parts(cfg).stack, names.sizes(cfg)
    runs = runs_of(params[stack], cfg.layers)
    rules = {rule.ours: rule for rule in names.rules(cfg)}
    whole = dict(named_leaves({n: x for n, x in params.items() if n != stack}))
    blocks: dict[str, list[Any]] = {}  # a leaf's stack in each run
    for part in runs.stacks:
        for n, leaf in named_leaves(part, lambda x: isinstance(x, QuantKernel)):
            blocks.setdefault(f"{stack}.{n}", []).append(leaf)
    if other := sorted((whole.keys() | blocks.keys()) ^ rules.keys()):
        raise UserError(f"the parameters are not this configuration's: {', '.join(other[:5])}")
    linear = set(matrices(cfg.axes))  # each is named, if it is dense: others expect codes of it
    groups: dict[str, list[tuple[Rule, Any]]] = {}
    for n, rule in rules.items():  # parts of a fused Linear in their order
        if n not in blocks:
            continue
        if n not in linear:
            whole[n] = blocks[n][0] if len(blocks[n]) == 1 else jnp.concatenate(blocks[n])
            continue
        for leaf, start, stop in zip(blocks[n], runs.starts, runs.stops, strict=True):
            for layer in range(start, stop):
                one = jax.tree.map(lambda x, i=layer - start: np.asarray(x[i]), leaf)
                groups.setdefault(rule.name((layer,)), []).append((rule, one))
    linears, singles = {}, {}
    for name, found in groups.items():
        stem = name.removesuffix(".weight")
        dense = [not isinstance(x, QuantKernel) for _, x in found]
        if all(dense):
            singles[name] = hf.join([r for r, _ in found], [x for _, x in found], sizes)
        elif any(dense):
            raise UserError(f"{stem}: some parts of one Linear are quantized, and others are not")
        else:
            linears[stem] = _joined(stem, [x for _, x in found])
    return whole, [rules[n] for n in whole], linears, singles


def _joined(stem: str, kernels: Sequence[QuantKernel]) -> Linear:
    """Returns one Linear of the parts that a file fuses, one piece each."""
    each = [jax.tree.map(lambda x: np.asarray(x[0]), k) for k in kernels]
    if any(k.scale is not None for k in each):
        raise UserError(
            f"{stem} has scales of its inputs (quant.awq), for which no form has a place; quantize "
            "with sources=folding.sources(cfg) and fold them (megajax/models/folding.py)"
        )
    orders = [None if k.order is None else k.order.tolist() for k in each]
    if any(k.weight.format != each[0].weight.format for k in each) or orders.count(orders[0]) < len(
        orders
    ):
        raise UserError(f"{stem}: the parts of one Linear must have one format and one order")
    weights = [k.weight for k in each]
    order_K = each[0].order
    if order_K is not None and np.array_equal(order_K, np.arange(len(order_K))):
        order_K = None
    if len(weights) == 1:
        return Linear(weights[0], order_K)
    q = jax.tree.map(
        lambda *x: np.concatenate(x, -1),
        *(dataclasses.replace(w, shape=weights[0].shape) for w in weights),
    )
    shape = weights[0].shape[0], sum(w.shape[1] for w in weights)
    joined: QTensor = dataclasses.replace(q, shape=shape)
    return Linear(joined, order_K)
