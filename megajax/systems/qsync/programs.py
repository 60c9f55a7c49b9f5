"""Checks that programs compiled for unlike GPUs start the same collectives in the same order.

In QSync (arXiv 2407.02327) every process of one synchronous job compiles the same training step
with the precisions of its kind of device, so a job runs several programs. NCCL and gloo match the
collectives of a group by their order alone. Where two programs differ, ranks hang, or they add
numbers of unlike types or layouts without an error. The compiler can cause a difference: it
combines collectives up to a threshold, orders them, and chooses layouts.

`sequence` reads the collectives of one program as rows, which processes exchange as JSON, and
`check_sequences` compares the rows of all kinds. A row is the text of a collective, or a list
[count, rows] for rows that repeat. The text has the kind with its reducer and dimension, the type,
shape and layout of every array, and the groups of devices. It leaves out names and channel ids, and
an asynchronous collective counts where it starts. Two programs are equal if they run equal
sequences, whichever loops these are written in.

Not compared: communication inside our own kernels, whose ranks share a node and so a kind; whether
two arrays of one shape hold the same parameter.
"""

import base64
import functools
import hashlib
import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from megajax.core import mesh
from megajax.core.errors import UserError
from megajax.cost.hlo import CALLS, Array, Instruction, Module, replica_groups
from megajax.cost.program_work import COLLECTIVES

type Row = str | list[Any]  # the text of a collective, or [count, rows]

PLACE = "megajax_programs"  # of the job's store
SPELLED = 64  # devices whose groups are spelled out in a row; of more, a digest (chosen)
_COPIES = ("parameter", "convert", "copy", "bitcast", "tuple", "get-tuple-element")


def check_programs(programs: Mapping[str, Any]) -> None:
    """Checks programs of one job: {kind of device: compiled program, or the text of its module}.

    Raises: UserError as `sequence` and `check_sequences` do.
    """
    rows = {}
    for kind, compiled in programs.items():
        try:
            rows[kind] = sequence(compiled)
        except UserError as error:
            raise UserError(f"the program of {kind}: {error}") from None
    check_sequences(rows)


def sequence(compiled: Any, kinds: Sequence[str] = ()) -> list[Row]:
    """Returns the collectives that a program runs, in the order of their starts, as JSON can hold.

    Args: compiled: a `jax.stages.Compiled`, or the text of its module. kinds: of each device of the
      program; collectives all of whose groups have devices of one kind are left out. ():
      none are.
    Raises: UserError if the order depends on values: a loop of unknown length has a collective, or
      the branches of a conditional have unlike ones.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    module = Module(text)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    return _Reader(module, math.prod(map(int, counts)), kinds).rows(module.entry)


def check_sequences(sequences: Mapping[str, Sequence[Row]]) -> None:
    """Checks that the programs of all kinds run the same collectives: {kind: rows of `sequence`}.

    Raises: UserError that names the first collective in which they differ.
    """
    if unlike := _difference(sequences):
        raise UserError(
            f"the programs of the kinds of devices differ from {unlike}; every process must start "
            "the same collectives in the same order: the precisions and rows of a kind may change "
            "products, not what kinds exchange, and all of them need the same jax and the same "
            "XLA_FLAGS (--precisions, --shares)"
        )


def compare_job(compiled: Any, kinds: Sequence[str], processes: Sequence[int]) -> None:
    """Compares this process's program with those of all others of its job, which must call it too.

    Processes of one kind must run the same collectives. Those of several kinds must run the same
    ones among their devices: with --shares, activations that tensor ranks exchange have the rows of
    their own kind. kinds: of each process. processes: of each device, in the order of the mesh.
    Raises: UserError in every process, as check_programs.
    """
    rows, error = [[], []], ""
    try:
        rows = [sequence(compiled), sequence(compiled, [kinds[rank] for rank in processes])]
    except UserError as problem:
        error = str(problem)
    text = json.dumps(rows)
    record = {"digest": hashlib.sha256(text.encode()).hexdigest(), "error": error}
    said = [json.loads(one) for one in mesh.tell_all(f"{PLACE}_digests", json.dumps(record))]
    for rank, one in enumerate(said):
        if one["error"]:
            raise UserError(f"the program of process {rank} ({kinds[rank]}): {one['error']}")
    digests = [one["digest"] for one in said]
    if len(set(digests)) == 1:
        return
    # One process of each program tells the others what is in it.
    first = digests.index(record["digest"]) == jax.process_index()
    packed = base64.b64encode(zlib.compress(text.encode())).decode() if first else ""
    texts = mesh.tell_all(f"{PLACE}_rows", packed)
    told = {
        rank: json.loads(zlib.decompress(base64.b64decode(one)))
        for rank, one in enumerate(texts)
        if one
    }
    names = {rank: f"{kinds[rank]} (process {rank})" for rank in told}
    for kind in dict.fromkeys(kinds):
        check_sequences({names[r]: full for r, (full, _) in told.items() if kinds[r] == kind})
    check_sequences({names[r]: among for r, (_, among) in told.items()})


def _difference(sequences: Mapping[str, Sequence[Row]]) -> str:
    """Returns the first collective in which some sequences differ, in words; "": in none."""
    if len({json.dumps(rows) for rows in sequences.values()}) <= 1:
        return ""
    steps = itertools.zip_longest(*map(_expanded, sequences.values()))
    for number, step in enumerate(steps, 1):
        if len(set(step)) == 1:
            continue
        runs: dict[str | None, list[str]] = {}
        for name, one in zip(sequences, step, strict=True):
            runs.setdefault(one, []).append(name)
        unlike = "; ".join(f"{', '.join(of)}: {one or 'no more'}" for one, of in runs.items())
        first, *others = (Counter(_expanded(rows)) for rows in sequences.values())
        ordered = " (the same ones follow in unlike orders)" * all(c == first for c in others)
        return f"collective {number} on{ordered}: {unlike}"
    return ""


def _expanded(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the collectives one by one. A device runs as many in each step, and takes longer."""
    for row in rows:
        if isinstance(row, str):
            yield row
        else:
            for _ in range(row[0]):
                yield from _expanded(row[1])


class _Reader:
    """Reads the collectives of a module's computations, each computation once."""

    def __init__(self, module: Module, devices: int, kinds: Sequence[str]):
        self._module, self._devices, self._kinds = module, devices, kinds
        self.rows = functools.cache(self._computation)

    def _computation(self, name: str) -> list[Row]:
        rows: list[Row] = []
        for one in self._module.instructions(name).values():
            if one.opcode.removesuffix("-start") in COLLECTIVES:
                rows += self._collective(one)
            elif one.opcode == "while":
                rows += self._loop(one)
            elif one.opcode == "conditional":
                rows += self._branch(one)
            elif one.opcode in CALLS:
                rows += itertools.chain.from_iterable(map(self.rows, one.called))
        return [
            [len(same), [row]] if len(same) > 1 else row
            for row, same in ((k, list(g)) for k, g in itertools.groupby(rows))
        ]

    def _loop(self, one: Instruction) -> list[Row]:
        """Returns a loop's rows; its condition runs before every iteration and at the end."""
        condition = self.rows(one.get("condition"))
        iteration = condition + self.rows(one.get("body"))
        if not iteration:
            return []
        if one.trips is None:
            raise UserError(
                f"the loop {one.op_name or one.name} runs {next(_expanded(iteration))} an unknown "
                "number of times, so programs cannot be compared; give the loop a fixed length"
            )
        return ([[one.trips, iteration]] if one.trips > 1 else iteration * one.trips) + condition

    def _branch(self, one: Instruction) -> list[Row]:
        """Returns the rows of any branch of a conditional, all of which must run the same."""
        branches = {branch: self.rows(branch) for branch in one.branches}
        if unlike := _difference(branches):
            raise UserError(
                f"the branches of the conditional {one.op_name or one.name} differ from {unlike}; "
                "so the order of collectives depends on values: all branches must run the same ones"
            )
        return next(iter(branches.values()), [])

    def _collective(self, one: Instruction) -> list[Row]:
        """Returns the row of a collective; none of a copy, and of a transfer to the host."""
        groups = sorted(replica_groups(one.attributes, self._devices))
        pairs = "source_target_pairs=" in one.attributes
        if "is_host_transfer=true" in one.attributes or pairs and all(a == b for a, b in groups):
            return []
        if self._kinds and all(len({self._kinds[i] for i in group}) == 1 for group in groups):
            return []
        kind = one.opcode.removesuffix("-start")
        reducer = self._module.instructions(one.called[0]).values() if one.called else ()
        sums = next((f"({i.opcode})" for i in reducer if i.opcode not in _COPIES), "")
        along = f" along {dims}" if (dims := one.get("dimensions")) else ""
        arrays = ", ".join(map(_spelled, one.received))
        return [f"{kind}{sums}{along} of {arrays} among {_listed(groups)}"]


def _spelled(array: Array) -> str:
    """Returns an array's type and shape, and its layout if that is not row by row."""
    text = f"{array.dtype}[{','.join(map(str, array.dims))}]"
    order = [d for d in array.layout if array.dims[d] != 1]  # the others lie anywhere
    if order == sorted(order, reverse=True):
        return text
    return f"{text}{{{','.join(map(str, array.layout))}}}"


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """Returns groups of devices as text: of many devices the first group and a digest of all."""
    text = ",".join(f"{{{','.join(map(str, group))}}}" for group in groups)
    if sum(map(len, groups)) <= SPELLED:
        return f"{{{text}}}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    first = ",".join(map(str, groups[0][:8])) + ",..." * (len(groups[0]) > 8)
    return f"{len(groups)} groups like {{{first}}} (sha256 {digest})"
