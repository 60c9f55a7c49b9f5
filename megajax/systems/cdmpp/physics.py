"""Computes the inputs of the predictor's network from records and from the card of a device.

There are two groups of inputs. The features of a program (a record) do not depend on the card and
may enter the network in any way. The times are what simple models of the program predict on the
card: its FLOPs at the peak, its tiles in waves over the SMs, its bytes at full bandwidth, and so
on. No time grows if the card's FLOP/s, bandwidth, SMs or L2 grow, so a network that is monotone in
the times is monotone in the card (network.py).

Tiles: the result of a matrix product is divided into tiles. Each SM computes one tile at a time, so
the tiles run in waves over the SMs (NeuSight, ASPLOS'25, section 4). Which size of tile a library
takes is not known before a run, so the times of all sizes in TILES are inputs, and the network
weighs them.

Legend: R rows, X inputs of the program, G general times, T tiles, N leaves, C columns of a leaf.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.record import (
    KINDS,
    LEAF,
    LEAF_FEATURES,
    OPCODES,
    PLACE,
    SIZES,
    OpRecord,
    peak,
)

# ---- power
#
# Rates that GPUs reach in float32 products, and that their power limits allow.
#
# At its power limit a GPU lowers its clock, and with it the voltage, so an operation needs less
# energy. The power of a GPU is modelled as what it needs at any clock, plus the operations of a
# second times the energy of one operation, which rises as a power of the current clock.


CLOCK = 1.5e9  # Hz, assumed for a card that has no clock
# (words of a GPU's name, compute capability, power limit in watts). Libraries choose kernels by the
# compute capability (CUDA C++ programming guide). The power limits are from datasheets. The first
# entry whose words all occur in a name is used.
_GPUS = (
    ("K80", 3.7, 300), ("P100", 6.0, 250), ("P40", 6.1, 250), ("P4", 6.1, 75),
    ("V100 PCIE", 7.0, 250), ("V100", 7.0, 300), ("T4", 7.5, 70),
    ("A100 PCIE 40GB", 8.0, 250), ("A100 PCIE", 8.0, 300), ("A100", 8.0, 400), ("A30", 8.0, 165),
    ("A800", 8.0, 400), ("A10", 8.6, 150), ("A10G", 8.6, 150), ("A40", 8.6, 300),
    ("L4", 8.9, 72), ("L40", 8.9, 300), ("L40S", 8.9, 350), ("H100 PCIE", 9.0, 350),
    ("H100", 9.0, 700), ("H200", 9.0, 700), ("H800", 9.0, 700), ("GH200", 9.0, 900),
    ("H20", 9.0, 400), ("B200", 10.0, 1000), ("B300", 10.3, 1400), ("GB200", 10.0, 1200),
)  # fmt: skip
# Power that a GPU needs at any clock (memory, leakage, voltage regulators): a constant in watts,
# plus a share of its power limit (assumed: 26 W of 70 W, 40 W of 250 W).
_IDLE, _IDLE_SHARE = 20.0, 0.08
# _JOULES: energy of a float32 operation at a clock of 1 GHz. _ENERGY_RISE: the exponent with which
# it rises with the clock. _NODES: (compute capability, factor on the energy of GPUs below it); the
# factor is that of the process node of their chips. The first two and the factor of 7 nm are set so
# that large linear layers of T4 and A100-40 reach 96 % of the `sustained` rate, and V100 is not
# throttled, as measured (NeuSight's test rows); P4's rate is 5 % too low then. 5 nm needs 30 % less
# energy than 7 nm (TSMC, N5), its later variants 10 % less than that (TSMC, N5P); 8 nm and 28 nm
# are assumed.
_JOULES, _ENERGY_RISE = 11.7e-12, 0.8
_NODES = ((6.0, 2.0), (8.0, 1.0), (8.6, 0.9), (8.9, 0.95), (np.inf, 0.57))
# (compute capability, share of their peak that GPUs below it reach in float32 products), relative
# to GPUs whose SMs have 64 float32 lanes. An SM with 128 lanes has no more issue slots and no more
# bandwidth of shared memory than one with 64, so it cannot keep all lanes busy. cuBLAS keeps 73 %
# of the lanes of an RTX PRO 6000 busy and 82 % of an H200's (kernelspace.substack.com, "Surfacing a
# 60% performance bug in cuBLAS"); with 64 lanes, 95 %. The SMs of a P4 have 128 lanes too, but they
# issue two instructions a clock.
_BUSY = ((8.6, 1.0), (9.0, 0.77), (np.inf, 0.86))


def with_chip(card: DeviceCard, *names: str) -> DeviceCard:
    """Returns the card with the compute capability and power limit of the GPU that it is named for.

    Rows of other projects, and files from before cards had these numbers, say only what a GPU is
    called. A card of no known GPU, and one that has the numbers, is returned as it is.
    Args: names: further names of the device, looked up if the card's is of no known GPU.
    """
    if card.capability or card.power_w:
        return card
    for name in (card.name, *names):
        words = set(name.upper().replace("-", " ").replace("_", " ").split())
        for needed, capability, watts in _GPUS:
            if words.issuperset(needed.split()):
                return dataclasses.replace(card, capability=capability, power_w=float(watts))
    return card


def busy(card: DeviceCard) -> float:
    """Returns the share of a card's peak that its SMs reach in float32 products; see _BUSY."""
    return next(share for below, share in _BUSY if card.capability < below)


def sustained(card: DeviceCard) -> float:
    """Returns the float32 FLOP/s that a card's power limit allows at the energy of its full clock.

    Infinity if the card lacks its compute capability or its power limit.
    """
    if not (card.capability and card.power_w):
        return np.inf
    node = next(share for below, share in _NODES if card.capability < below)
    rise = ((card.clock_hz or CLOCK) / 1e9) ** _ENERGY_RISE
    return (card.power_w * (1 - _IDLE_SHARE) - _IDLE) / (_JOULES * rise * node)


def throttled(rate: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Returns the FLOP/s that are left of `rate` once the power limit has lowered the clock.

    Args: rate: FLOP/s at the card's full clock. limit: FLOP/s that the power limit would allow if
      each operation took the energy that it takes at full clock (see `sustained`). At a fraction s
      of that clock an operation takes s^_ENERGY_RISE of the energy, so the clock falls until
      s^(1 + _ENERGY_RISE) = limit / rate.
    """
    power = 1 / (1 + _ENERGY_RISE)
    return np.minimum(rate, rate ** (1 - power) * limit**power)


# ---- features and times


TILES = ((32, 32), (64, 32), (32, 128), (128, 32), (64, 64), (128, 64), (128, 128), (256, 128))
TIMES = 11  # general times, which are those that no tile has a part in (see `times`)
LEAVES = 8  # most leaves of a tree that the encoder reads; of more, it reads some evenly spaced
DTYPES = ("float32", "bfloat16", "float16", "tfloat32", "float8", "int8")
_LOGS = (
    "batch", "m", "n", "k", "flops", "transcendentals", "elements", "rows", "width", "reduced",
    "indices", "operands", "stride", "stride_right", "run", "span", "dilated", "custom", "parts",
    "jumps", *PLACE,
)  # fmt: skip
PLACES = slice(len(_LOGS) - len(PLACE), len(_LOGS))  # inputs that say where in a program a row is
LOGS = len(_LOGS) + 6 + len(TILES)
# Inputs that say what sizes and strides are multiples of, and how much padding tiles need: they
# jump between sizes that are nearly equal.
ALIGNMENT = slice(LOGS - len(TILES) - 2, LOGS + 8)
_FLAGS = 8 + 5 + len(KINDS) + len(DTYPES)
INPUTS = LOGS + _FLAGS + 2 * len(OPCODES)  # of a program
# Peak FLOP/s of devices, and the operations of one SM in one clock that devices with such a peak
# have. This is interpolated, and not computed as the peak over SMs and clock, because with that
# quotient a card with more SMs would be predicted to be slower.
_PEAKS = (1e11, 1e12, 4e12, 2e13, 3e13, 7e13, 1.56e14, 3.12e14, 5e14, 1e15, 2e15, 4.5e15)
_PER_CLOCK = (32, 64, 128, 128, 256, 256, 1024, 2048, 2048, 4096, 8192, 16384)
# Operations that the matrix units (tensor cores) of an SM can do in a clock, because its shared
# memory delivers 128 bytes of operands a clock (assumed: 16 operations for a byte). The network
# learns what a device really reaches.
_FED = 2048
# Operations and bytes of one thread of a CPU in a clock, and clocks of a jump to an address that is
# in no near cache (assumed; the network corrects them).
_THREAD_FLOPS, _THREAD_BYTES, _JUMP = 32, 16, 4
# Bytes from which on the elements of a stride all fall into one set of a cache, or nearly so
# (chosen; of the L1 caches of x86 processors from 4096 on, larger caches have more sets).
_SETS = 2**16
# Operations in a data type that take the energy of one in float32. Tensor cores at their peak are
# assumed to need as much power as the other cores at theirs.
_CHEAPER = {"tfloat32": 8, "bfloat16": 16, "float16": 16, "float8": 32, "int8": 32}


@dataclasses.dataclass(frozen=True)
class Programs:
    """Features of records, in arrays, without anything that depends on a card.

    inputs_RX: LOGS logarithms, then flags and classes. leaves_RNC, positions_RN: trees; a position
    of -1 is padding. kinds_R: index into KINDS. flops_R, bytes_R: FLOPs and bytes of one execution.
    work_R: FLOPs, in which a transcendental function counts as 8. product_R: 1 for products.
    sizes_R4: batch, m, n, k.
    """

    inputs_RX: np.ndarray
    leaves_RNC: np.ndarray
    positions_RN: np.ndarray
    kinds_R: np.ndarray
    flops_R: np.ndarray
    bytes_R: np.ndarray
    work_R: np.ndarray
    product_R: np.ndarray
    sizes_R4: np.ndarray
    parts_R: np.ndarray
    jumps_R: np.ndarray
    dtypes: tuple[str, ...]

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.flops_R)

    def __getitem__(self, mask_R: np.ndarray) -> "Programs":
        """Returns the rows of a mask."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        dtypes = tuple(
            d for d, is_chosen in zip(values.pop("dtypes"), mask_R, strict=True) if is_chosen
        )
        return Programs(**{name: array[mask_R] for name, array in values.items()}, dtypes=dtypes)


def programs(records: Sequence[OpRecord]) -> Programs:
    """Returns the features of these records."""
    unique = list({id(record): record for record in records}.values())
    place = {id(record): row for row, record in enumerate(unique)}
    index = np.array([place[id(record)] for record in records], int)
    table = {
        name: np.array([record[name] for record in unique])
        for name in (*_LOGS, "transposed", "itemsize", "reduces_minor")
    }
    sizes = np.maximum(np.stack([table[n] for n in ("batch", "m", "n", "k")], -1), 1)
    is_product = np.prod([table[n] > 0 for n in ("m", "n", "k")], axis=0)
    flops = np.array([record.flops for record in unique], float)
    nbytes = np.array([record.nbytes for record in unique], float)
    leaves, positions = _trees(unique)
    inputs = np.concatenate(
        [
            _logarithms(table, sizes, flops, nbytes),
            _flags(table, sizes, unique),
            np.log1p(leaves[..., : len(OPCODES)].sum(1)),
            np.log1p(np.array([_results(record) for record in unique]).reshape(-1, len(OPCODES)))
            / 5,
        ],
        axis=-1,
    )
    return Programs(
        inputs[index].astype(np.float32),
        leaves[index],
        positions[index],
        np.array([KINDS.index(record.kind) for record in unique], int)[index],
        flops[index],
        nbytes[index],
        (flops + 8 * table["transcendentals"])[index],
        is_product.astype(float)[index],
        sizes[index],
        table["parts"][index],
        table["jumps"][index],
        tuple(record.dtype for record in records),
    )


def _results(record: OpRecord) -> np.ndarray:
    """Returns, for each class of OPCODES, how many elements the operations of a record compute.

    A reduction counts by the elements that it reads.
    """
    leaves = record.tree.leaves.astype(np.float64)
    elements, flops = (
        leaves[:, len(OPCODES) + LEAF_FEATURES.index(name)] for name in ("elements", "flops")
    )
    is_reduction = leaves[:, OPCODES.index("reduce")] > 0
    return np.where(is_reduction, np.maximum(elements, flops), elements) @ leaves[:, : len(OPCODES)]


def _logarithms(
    table: Mapping[str, np.ndarray], sizes: np.ndarray, flops: np.ndarray, nbytes: np.ndarray
) -> np.ndarray:
    columns = [np.log(np.maximum(table[name], 1)) for name in _LOGS]
    _, m, n, _ = sizes.T
    columns += [np.log(np.minimum(m, n)), np.log(np.maximum(m, n)), np.log(np.maximum(nbytes, 1))]
    columns += [np.log(np.maximum(flops, 1) / np.maximum(nbytes, 1))]
    columns += [np.log(_power_of_two(table[name])) for name in ("stride", "stride_right")]
    for rows, width in TILES:
        padded = np.ceil(m / rows) * rows * np.ceil(n / width) * width
        columns.append(np.log(padded / (m * n)))
    return np.stack(columns, -1)


def _power_of_two(strides: np.ndarray) -> np.ndarray:
    """Returns the largest power of two that divides each stride, 1 of a stride of 0.

    It decides how many sets of a cache the elements fall into (cost/program_body.py).
    """
    integers = strides.astype(np.int64)
    return np.clip(integers & -integers, 1, _SETS)


def _flags(
    table: Mapping[str, np.ndarray], sizes: np.ndarray, records: Sequence[OpRecord]
) -> np.ndarray:
    width = table["width"]
    columns = [size % factor == 0 for size in (*sizes.T[1:], width) for factor in (4, 32)]
    columns += [width > 1024, width > 2048, table["reduces_minor"], table["transposed"] / 2]
    columns += [np.log2(np.maximum(table["itemsize"], 0.25))]
    columns += [np.array([record.kind == kind for record in records]) for kind in KINDS]
    columns += [np.array([record.dtype == dtype for record in records]) for dtype in DTYPES]
    return np.stack([np.asarray(column, float) for column in columns], -1)


def _trees(records: Sequence[OpRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Returns leaves and positions, padded to the longest tree of these (LEAVES at most)."""
    longest = min(LEAVES, max((len(r.tree.positions) for r in records), default=1) or 1)
    leaves = np.zeros((len(records), longest, LEAF), np.float32)
    positions = np.full((len(records), longest), -1, np.int32)
    for row, record in enumerate(records):
        count = len(record.tree.positions)
        chosen = (
            np.arange(count) if count <= LEAVES else np.linspace(0, count - 1, LEAVES).astype(int)
        )
        leaves[row, : len(chosen)] = record.tree.leaves[chosen]
        positions[row, : len(chosen)] = record.tree.positions[chosen]
    classes = len(OPCODES)
    leaves[..., classes:] = np.log1p(np.maximum(leaves[..., classes:], 0)) / 10
    assert leaves.shape[-1] == classes + len(LEAF_FEATURES)
    return leaves, positions


@dataclasses.dataclass(frozen=True)
class Times:
    """Logarithms of seconds on a card: floor (R,), general (R, G), waves and traffic (R, T)."""

    floor_R: np.ndarray
    general_RG: np.ndarray
    waves_RT: np.ndarray
    traffic_RT: np.ndarray


def check_card(name: str, card: DeviceCard) -> None:
    """Raises: UserError if the card lacks FLOP/s, SMs, L2 or bandwidth, which the times need.

    A clock of 0 is unknown. Any other value that is not a positive number is refused.
    """
    needed = {
        "flops": max(card.flops.values(), default=0),
        "sms": card.sms,
        "l2_bytes": card.l2_bytes,
        "memory_bytes_per_s": card.memory_bytes_per_s,
        **{f"flops[{dtype!r}]": value for dtype, value in card.flops.items()},
        **({"clock_hz": card.clock_hz} if card.clock_hz != 0 else {}),
    }
    for field, value in needed.items():
        if not value > 0 or not np.isfinite(value):
            raise UserError(
                f"the card of {name} has {field}={value}; a prediction needs a positive number"
            )


def times(rows: Programs, card: DeviceCard) -> Times:
    """Returns the times of these rows on one card."""
    peaks = {dtype: peak(card, dtype) for dtype in set(rows.dtypes)}
    peak_R = np.array([peaks[dtype] for dtype in rows.dtypes], float)
    limit_R = sustained(card) * np.array([_CHEAPER.get(dtype, 1) for dtype in rows.dtypes], float)
    is_plain_R = np.array([dtype == "float32" for dtype in rows.dtypes], bool)
    busy_R = np.where(is_plain_R & (rows.product_R > 0), busy(card), 1.0)
    flops, nbytes = np.maximum(rows.work_R, 1), np.maximum(rows.bytes_R, 1)
    bandwidth, clock = card.memory_bytes_per_s, card.clock_hz or CLOCK
    floor = np.maximum(rows.flops_R / peak_R, rows.bytes_R / bandwidth)
    at_bandwidth, ones = np.log(nbytes / bandwidth), np.ones(len(rows))
    general = (
        np.log(flops / throttled(peak_R * busy_R, limit_R)),
        at_bandwidth,
        np.where(
            is_plain_R, -60, np.log(flops / card.sms / clock / _FED)
        ),  # operands of matrix units
        at_bandwidth
        + np.log(nbytes / (nbytes + card.l2_bytes)),  # what no cache of that size holds
        np.log(1e-5) * ones,  # a launch
        np.log(1e-5 * 1.4e9 / clock) * ones,
        (at_bandwidth + np.log(nbytes / card.sms / 4e9)) / 2,
        (at_bandwidth + np.log(nbytes / peak_R * 25)) / 2,
        *_on_threads(rows, card, clock),
    )
    waves, traffic = _tiles(rows, card, clock * _per_clock(peak_R) * busy_R, limit_R)
    return Times(np.log(np.maximum(floor, 1e-12)), np.stack(general, -1), waves, traffic)


def _on_threads(rows: Programs, card: DeviceCard, clock: float) -> list[np.ndarray]:
    """Returns log times of a loop's work and bytes on the threads that it can use, and of jumps."""
    is_loop, has_jumps = rows.parts_R > 0, rows.jumps_R > 0
    threads = np.where(is_loop, np.minimum(rows.parts_R, card.sms), card.sms)
    at_once = np.log(threads * clock)
    work, nbytes = np.maximum(rows.work_R, 1), np.maximum(rows.bytes_R, 1)
    return [
        np.where(is_loop, np.log(work / _THREAD_FLOPS) - at_once, -60),
        np.where(is_loop, np.log(nbytes / _THREAD_BYTES) - at_once, -60),
        np.where(has_jumps, np.log(np.maximum(rows.jumps_R, 1) * _JUMP) - at_once, -60),
    ]


def _per_clock(peak_R: np.ndarray) -> np.ndarray:
    return np.exp(np.interp(np.log(peak_R), np.log(_PEAKS), np.log(_PER_CLOCK)))


def _tiles(
    rows: Programs, card: DeviceCard, rate_R: np.ndarray, limit_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two log times for each size of tile: that of its waves, and that of its traffic with
    memory.

    rate_R: FLOP/s of one SM. The power limit applies to the average number of SMs that have a tile,
    because then a card with more SMs is never predicted to be slower. Panels of the operands that
    the tiles of one wave share are read again by the next wave, unless the L2 cache holds them.
    """
    batch, m, n, k = rows.sizes_R4.T
    size = np.exp2(np.round(np.log2(np.array([SIZES.get(d, 4) for d in rows.dtypes]))))
    operands = size * batch * (m * k + k * n)
    waves, traffic = [], []
    for height, width in TILES:
        tiles = batch * np.ceil(m / height) * np.ceil(n / width)
        turns = np.ceil(tiles / card.sms)
        work = tiles * 2 * height * width * k
        waves.append(np.log(work / throttled(tiles / turns * rate_R, limit_R)))
        # Tiles that run together are a square: they read `side` panels of each operand once.
        side = np.sqrt(np.minimum(card.sms, tiles / batch))
        read = np.maximum(size * tiles * (height + width) * k / side, operands)
        panels = size * side * (height + width) * k
        read = operands + (read - operands) * panels / (panels + card.l2_bytes)
        traffic.append(np.log(read / card.memory_bytes_per_s))
    return np.stack(waves, -1), np.stack(traffic, -1)
