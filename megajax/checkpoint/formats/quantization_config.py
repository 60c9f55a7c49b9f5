"""The quantization_config of a Hugging Face folder in GPTQ's or AWQ's form: checked, and written.

It states bits and group for all Linears. GPTQModel's member `dynamic` states others for some, by
the names of the modules: "PATTERN" or "+:PATTERN" has the members that differ, "-:PATTERN" leaves
the module dense. The first pattern that matches from the beginning of the name counts. AWQ's member
`modules_to_not_convert` lists parts of the names of dense modules. Our reader does not need it,
because a dense module has a `.weight`. Of AWQ's form, transformers and AutoAWQ read that list, and
GPTQModel reads `dynamic`, so both are written. A symmetric AWQ folder has no member `sym`:
GPTQModel reads `zero_point` as its opposite.
"""

import collections
import dataclasses
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megajax.checkpoint.formats.integers import BITS
from megajax.core.errors import UserError

Form = Literal["gptq", "gptq_v1", "awq"]  # checkpoint_format gptq_v2, gptq; version gemm
Kind = tuple[int, int | None]  # bits, group (None: the whole column)
SECTION = "quantization_config"
AWQ_BITS = 4
SUPPORTED = "gptq (2, 3, 4 and 8 bits) and awq (4 bits, version gemm)"
MAX_GROUP = 2**31 - 1  # (chosen) rows: more than a Linear has, and arrays of places hold it
# (chosen) of a folder of strangers: Python's `re` may take for ever. Names have some 40 characters.
MAX_RULES, MAX_PATTERN, MAX_REPEATS = 10_000, 1000, 4
NAME, MAX_STEPS = 40, 3_000_000  # steps of all patterns on one name, NAME ** repeats each
_LAYER = re.compile(r".*?\.\d+\.")  # model.layers.3. of model.layers.3.mlp.up_proj
_REPEAT, _REPEATED_GROUP = re.compile(r"[*+]|\{\d*,"), re.compile(r"\)[*+{]")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a quantization_config says. bits, group: of most modules; None: the whole column.
    is_less: whether qzeros hold z - 1. dynamic: ((pattern, kind or None: dense), ...)."""

    method: Literal["gptq", "awq"]
    bits: int
    group: int | None
    is_less: bool
    dynamic: tuple[tuple[re.Pattern[str], Kind | None], ...] = ()

    def of(self, module: str) -> Kind | None:
        """Returns bits and group of a module; None: it is dense."""
        for pattern, kind in self.dynamic:
            if pattern.match(module):
                return kind
        return self.bits, self.group


def checked(found: Mapping[str, Any]) -> Settings:
    """Returns the settings. Raises: UserError for what is not supported, and why."""
    method = found.get("quant_method")
    if method not in ("gptq", "awq"):
        raise UserError(f"{SECTION}: quant_method={method!r} is not supported; {SUPPORTED} are")
    if found.get("is_marlin_format") or found.get("pack_dtype", "int32") not in ("int32", None):
        raise UserError(
            f"{SECTION}: codes must be packed in words of int32 (pack_dtype), not for Marlin"
        )
    form = _first(found, "checkpoint_format", "format")
    form = {"awq": "gemm", "gptq": "gptq"}[method] if form is None else form
    if method == "awq":
        for name, value in {"version": found.get("version", "gemm"), "format": form}.items():
            if str(value).lower() != "gemm":
                raise UserError(f"{SECTION}: {name}={value!r} of awq must be gemm")
    elif form not in ("gptq", "gptq_v2"):
        raise UserError(f"{SECTION}: checkpoint_format={form!r} must be gptq or gptq_v2")
    kind = _kind(found, method, {"bits": None, "group_size": 128}, SECTION)
    rules = found.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise UserError(f"{SECTION}: dynamic must be an object of patterns and their members")
    if len(rules) > MAX_RULES:
        raise UserError(
            f"{SECTION}: dynamic has {len(rules):,} patterns; at most {MAX_RULES:,} are read"
        )
    base = {"bits": kind[0], "group_size": -1 if kind[1] is None else kind[1]}
    dynamic = tuple(_rule(pattern, more, method, base) for pattern, more in rules.items())
    steps = sum(NAME ** len(_REPEAT.findall(compiled.pattern)) for compiled, _ in dynamic)
    if steps > MAX_STEPS:
        raise UserError(
            f"{SECTION}: the patterns of dynamic may take {steps:,} steps for a name, at most "
            f"{MAX_STEPS:,} are allowed: give fewer of them or fewer repeats without end"
        )
    return Settings(method, *kind, method == "gptq" and form == "gptq", dynamic)


def _first(found: Mapping[str, Any], *names: str) -> Any:
    return next((found[name] for name in names if found.get(name) is not None), None)


def _kind(found: Mapping[str, Any], method: str, base: Mapping[str, Any], where: str) -> Kind:
    bits = _first(found, "bits", "w_bit")
    bits = base["bits"] if bits is None else bits
    group = _first(found, "group_size", "q_group_size")
    group = base["group_size"] if group is None else group
    legal = BITS if method == "gptq" else (AWQ_BITS,)
    if isinstance(bits, bool) or bits not in legal:
        raise UserError(f"{where}: bits={bits!r} of {method} must be one of {legal}")
    if not isinstance(group, int) or isinstance(group, bool) or not (group == -1 or group > 0):
        raise UserError(f"{where}: group_size={group!r:.100} must be at least 1, or -1")
    if group > MAX_GROUP:
        raise UserError(
            f"{where}: group_size={reprlib.repr(group)} must be at most {MAX_GROUP:,}, or -1 for "
            "one group of all inputs"
        )
    return int(bits), None if group == -1 else group


def _rule(
    pattern: str, more: Any, method: str, base: Mapping[str, Any]
) -> tuple[re.Pattern[str], Kind | None]:
    where = f"{SECTION}: dynamic {pattern[:200]!r}"
    text = pattern[2:] if pattern[:2] in ("+:", "-:") else pattern
    repeats = len(_REPEAT.findall(text))
    if len(text) > MAX_PATTERN or repeats > MAX_REPEATS or _REPEATED_GROUP.search(text):
        raise UserError(
            f"{where}: a pattern may have {MAX_PATTERN} characters, {MAX_REPEATS} repeats without "
            "end, and no repeated group"
        )
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(f"{where} is no regular expression: {error}") from None
    if pattern[:2] == "-:":
        return compiled, None
    if not isinstance(more, Mapping):
        raise UserError(f"{where} must have an object of members, such as {{'bits': 8}}")
    other = _first(more, "quant_method", "method", "checkpoint_format", "format", "pack_dtype")
    if other is not None:
        raise UserError(f"{where}: all modules must have one method and form, found {other!r}")
    return compiled, _kind(more, method, base, where)


# ---- written


def written(
    form: Form,
    kinds: Mapping[str, Kind],
    dense: Sequence[str],
    *,
    desc_act: bool,
    symmetric: bool,
) -> dict[str, Any]:
    """Returns a quantization_config.

    Args: kinds: {module: (bits, group)}. dense: modules of the same blocks without codes.
      desc_act: whether rows of a group lie apart. symmetric: whether all zero points are 2^(b-1).
    Raises: UserError for more than MAX_RULES rules, which `checked` would refuse.
    """
    most = collections.Counter(kinds.values()).most_common(1)[0][0]
    if form == "awq":
        members = {
            "quant_method": "awq", "version": "gemm", "zero_point": True,
            "modules_to_not_convert": ["lm_head", *dense],
        }  # fmt: skip
    else:
        members = {
            "quant_method": "gptq", "desc_act": desc_act, "lm_head": False, "sym": symmetric,
            "checkpoint_format": "gptq_v2" if form == "gptq" else "gptq",
        }  # fmt: skip
    rules = {}
    for name, kind in _named({**dict.fromkeys(dense), **kinds}).items():
        if kind is None:
            rules[f"-:{name}"] = {}
        elif kind != most:
            rules[f"+:{name}"] = _sizes(kind)
    if len(rules) > MAX_RULES:
        raise UserError(
            f"{SECTION}: {len(rules):,} modules or layers differ from the most common format; "
            f"dynamic may have {MAX_RULES:,} rules; use fewer formats"
        )
    return members | _sizes(most) | ({"dynamic": rules} if rules else {})


def _sizes(kind: Kind) -> dict[str, int]:
    bits, group = kind
    return {"bits": bits, "group_size": -1 if group is None else group}


def _named(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {pattern: kind}: one for a layer whose modules are alike, so that a program which
    fuses some of them (vLLM) finds it by the fused name too; else one for each module."""
    layers: dict[str, dict[str, Any]] = {}
    for module, kind in kinds.items():
        home = _LAYER.match(module)
        layers.setdefault(home[0] if home else module, {})[module] = kind
    found = {}
    for home, modules in layers.items():
        if len(set(modules.values())) == 1 and home not in modules:
            found[f"^{re.escape(home)}"] = next(iter(modules.values()))
        else:
            found |= {f"^{re.escape(module)}$": kind for module, kind in modules.items()}
    return found
