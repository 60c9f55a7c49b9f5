"""What experiments/qsync.py plans and shows: QSync's precisions beside rivals, table, figure.

A `Case` is a training run on a cluster whose kinds may fill some share of their memory. Its rows
are the ways to run it: full precision, one precision for the weak kinds, uneven batches, and the
allocator's plans. No jax arrays.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.reports.reporting import panels, save, table
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.core.hardware import MixedCluster
from megajax.cost.base import CostModel
from megajax.cost.roofline import Roofline
from megajax.cost.table import Table
from megajax.monitor import results
from megajax.systems.cdmpp import backend
from megajax.systems.qsync import Graph, Precisions, allocate, model, replay
from megajax.training.shape import is_open, resolved

Row = dict[str, Any]
PAPER = (
    "the paper, on real GPUs: replay within 5 % of the measured step, 0.27 to 1.03 points more "
    "accuracy than one precision for all products (abstract); not reproduced: no such GPUs here"
)
FULL = "full precision"
UNEVEN = "uneven batches, full precision"
GREEDY, EXACT = "QSync, greedy", "QSync, exact"
COLOURS = {FULL: "0.55", UNEVEN: "C1", GREEDY: "C0", EXACT: "C0"}


class Case:
    """A run on a cluster.

    job: a JobConfig. shares: {kind: share of its memory that a step may fill}; a kind without one
    may fill all. omega: {product: {precision: error}}; None: assumed. options: a QSyncConfig.
    """

    def __init__(
        self,
        job: Any,
        cluster: MixedCluster,
        shares: Mapping[str, float],
        omega: Mapping[str, Mapping[str, float]] | None,
        options: Any,
    ) -> None:
        """Raises: UserError for a batch that the devices cannot divide evenly, and for what no run
        can do on these devices."""
        self.cluster, self.options = cluster, options
        self.cards = {card.name.lower(): card for card in cluster.cards}
        self.devices = dict(collections.Counter(card.name.lower() for card in cluster.cards))
        self.shares = dict.fromkeys(self.cards, 1.0) | dict(shares)
        batch = job.train.global_batch
        if batch % (cluster.devices * job.train.accumulate):
            least = cluster.devices * job.train.accumulate
            near = max(batch // least, 1) * least
            raise UserError(
                f"train.global_batch={batch} must be a multiple of {least} (devices x "
                f"train.accumulate); nearest: {near}, {near + least} (--train.global_batch)"
            )
        model.check(job)
        job = dataclasses.replace(job, precisions="precisions.json")  # as the run will be checked
        sizes = job.mesh.sizes(cluster.devices)
        job.check(sizes)
        room = min(self.shares[kind] * card.memory_bytes for kind, card in self.cards.items())
        self.job = resolved(job, sizes, int(room)) if is_open(job) else job
        self.even = batch // cluster.devices
        self.shared = model.UnlikeJob(
            self.job,
            cluster.devices,
            cluster.link,
            omega,
            1.0 if options.gamma is None else options.gamma,
            options.buckets,
            options.int8_backward,
        )
        self._alone: dict[tuple[str, float], float] = {}

    @functools.cached_property
    def costs(self) -> dict[str, CostModel]:
        """The cost model of each kind; a kind without a table has the roofline."""
        name, file = self.options.cost, self.options.cost_file
        if name != "table" or file is None:
            loaded = backend.load(name, file)
            return dict.fromkeys(self.cards, loaded)
        loaded = [Table.load(expand(one, "cost_file")) for one in file.split(",")]
        tables = {table.device.lower(): table for table in loaded}
        return {kind: tables.get(kind, Roofline()) for kind in self.cards}

    @functools.cached_property
    def strong(self) -> list[str]:
        """The kinds that compute in full precision."""
        text = self.options.strong
        if text == "fastest":
            return [min(self.cards, key=lambda kind: self.alone(kind, self.even))]
        for kind in (names := [name.strip().lower() for name in text.split(",")]):
            if kind not in self.cards:
                raise UserError(
                    f"strong={text}: {kind!r} must be fastest or of {', '.join(self.cards)} "
                    "(--strong, --cluster)"
                )
        return names

    def graph(self, kind: str, rows: float, is_strong: bool) -> Graph:
        """Returns the step of a device of a kind on so many rows."""
        return model.step_graph(self.shared, self.cards[kind], rows, self.costs[kind], is_strong)

    def alone(self, kind: str, rows: float) -> float:
        """Returns the seconds of a kind's step in full precision, without the exchange."""
        if (kind, rows) not in self._alone:
            graph = self.graph(kind, rows, is_strong=True)
            graph = dataclasses.replace(graph, buckets=())
            self._alone[kind, rows] = replay({kind: graph}, {kind: _full(graph)}).step_s
        return self._alone[kind, rows]

    def limit(self, kind: str, rows: float) -> float:
        """Returns the bytes that saved values may take."""
        return model.limit(self.shared, self.cards[kind], rows, self.shares[kind])

    def uneven(self) -> dict[str, int]:
        """Returns the rows of each kind's fullest device: row after row goes to the device that
        ends first with it."""
        ends = [
            (self.alone(kind, 1), kind, 0, i) for kind, n in self.devices.items() for i in range(n)
        ]
        heapq.heapify(ends)
        most = dict.fromkeys(self.cards, 0)
        for _ in range(self.job.train.global_batch):
            _, kind, rows, i = heapq.heappop(ends)
            most[kind] = max(most[kind], rows + 1)
            heapq.heappush(ends, (self.alone(kind, rows + 2), kind, rows + 1, i))
        return most

    def rows(self) -> tuple[list[Row], Precisions]:
        """Returns the ways to run the case, and the best plan's precisions of the products.

        Raises: UserError where no plan keeps the memory.
        """
        even = dict.fromkeys(self.cards, float(self.even))
        graphs = {kind: self.graph(kind, even[kind], kind in self.strong) for kind in self.cards}
        names = {kind: model.products(graph) for kind, graph in graphs.items()}
        full = self.job.train.dtype
        rows = [self._row(FULL, graphs, even, _uniform(graphs, names, full))]
        uneven = {kind: float(n) for kind, n in self.uneven().items()}
        if min(uneven.values()) > 0:
            others = {kind: self.graph(kind, n, is_strong=True) for kind, n in uneven.items()}
            rows.append(self._row(UNEVEN, others, uneven, _uniform(others, names, full)))
        offered = {
            p
            for kind, graph in graphs.items()
            for p in graph.by_name[names[kind][0]].omega or ()
            if p != full
        }
        for precision in sorted(offered, key=model.PRECISIONS.index, reverse=True):
            chosen = _uniform(graphs, names, precision)
            rows.append(self._row(f"{precision} in weak kinds", graphs, even, chosen))
        memory = {kind: max(self.limit(kind, even[kind]), 0.0) for kind in self.cards}
        best = Precisions()
        self._check_room(graphs, rows, even)
        for name, method in ((GREEDY, "greedy"), (EXACT, "exact")):
            plan = allocate(graphs, self.devices, memory=memory, method=method)
            best = Precisions(
                {kind: {n: plan[kind][n] for n in names[kind]} for kind in self.cards}
            )
            rows.append(self._row(name, graphs, even, best) | {"gap": plan.gap})
        return rows, best

    def _check_room(
        self, graphs: Mapping[str, Graph], rows: Sequence[Row], even: Mapping[str, float]
    ) -> None:
        """Raises: UserError where a kind has no room for the narrowest values that it may save."""
        for kind, graph in graphs.items():
            room = self.limit(kind, even[kind])
            least = sum(min(node.saved_bytes.values()) for node in graph.nodes)
            if least > room:
                fewest = min(row["memory_bytes"][kind] for row in rows if row["rows"] == even)
                raise UserError(
                    f"no plan fits {kind}: {even[kind]:g} rows take {fewest / 1e9:.2f} GB or more, "
                    f"and a step may fill {rows[0]['room_bytes'][kind] / 1e9:.2f} GB; give fewer "
                    "rows, more memory, or save less for the backward pass "
                    "(--train.global_batch, --memory, --train.remat)"
                )

    def _row(
        self,
        name: str,
        graphs: Mapping[str, Graph],
        device_rows: Mapping[str, float],
        chosen: Mapping[str, Mapping[str, str]],
    ) -> Row:
        step = replay(graphs, chosen)
        needed, room = {}, {}
        for kind, card in self.cards.items():
            room[kind] = self.shares[kind] * card.memory_bytes
            needed[kind] = step.memory[kind] + room[kind] - self.limit(kind, device_rows[kind])
        alone = {
            kind: replay(
                {kind: dataclasses.replace(graph, buckets=())}, {kind: chosen[kind]}
            ).step_s
            for kind, graph in graphs.items()
        }
        return {
            "cluster": self.cluster.name,
            "shares": {kind: share for kind, share in self.shares.items() if share < 1},
            "method": name,
            "strong": self.strong,
            "step_s": step.step_s,
            "compute_s": alone,
            "rows": dict(device_rows),
            "memory_bytes": needed,
            "room_bytes": room,
            "fits": all(needed[kind] <= room[kind] for kind in self.cards),
            "omega": sum(
                graph.by_name[n].omega[p]
                for kind, graph in graphs.items()
                for n, p in chosen[kind].items()
            ),
            "precisions": {
                kind: dict(collections.Counter(chosen[kind].values())) for kind in self.cards
            },
            "casts": sum(map(len, step.casts.values())),
        }


def _full(graph: Graph) -> dict[str, str]:
    """Returns the widest precision of each product."""
    order = model.PRECISIONS
    return {n: max(graph.by_name[n].omega or (), key=order.index) for n in model.products(graph)}


def _uniform(
    graphs: Mapping[str, Graph], names: Mapping[str, Sequence[str]], precision: str
) -> dict[str, dict[str, str]]:
    """Returns one precision for all products, or the next wider one that a product may have."""
    order = model.PRECISIONS
    return {
        kind: {
            n: min(
                graph.by_name[n].omega or (),
                key=lambda p: (order.index(p) < order.index(precision), order.index(p)),
            )
            for n in names[kind]
        }
        for kind, graph in graphs.items()
    }


def text(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """Returns a case for the console."""
    first = rows[0]
    lines = [
        f"{about['model']} on {_case(first)}: simulated "
        f"estimate, times: {about['times']}, errors: {about['omega']}; "
        f"{', '.join(first['strong'])} in full precision"
    ]
    shown = []
    for row in rows:
        kinds = row["precisions"]
        shown.append(
            {
                "method": row["method"],
                "step_ms": 1e3 * row["step_s"],
                "speedup": first["step_s"] / row["step_s"],
                "omega": row["omega"],
                "memory": ", ".join(
                    f"{kind} {needed / 1e9:.2f}/{row['room_bytes'][kind] / 1e9:.1f}"
                    for kind, needed in row["memory_bytes"].items()
                )
                + ("" if row["fits"] else " DOES NOT FIT"),
                "rows": ", ".join(f"{kind} {n:g}" for kind, n in row["rows"].items()),
                "products": "; ".join(
                    f"{kind} {_counts(counts)}"
                    for kind, counts in kinds.items()
                    if kind not in row["strong"]
                ),
            }
        )
    heads = {
        "": "method",
        "step, ms": "step_ms",
        "speedup": "speedup",
        "sum of omega": "omega",
        "memory, GB": "memory",
        "rows a device": "rows",
        "products of weak kinds": "products",
    }
    return "\n".join([*lines, results.columns(shown, heads)])


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the step of every way to run each case, the time that kinds wait included."""
    cases = [list(group) for _, group in itertools.groupby(rows, _case)]
    most = max(map(len, cases))
    figure, panes = panels(rows=len(cases), size=(8.5, 0.6 + len(cases) * (0.5 + 0.3 * most)))
    for axes, case in zip(panes, cases, strict=True):
        for y, row in enumerate(reversed(case)):
            method, step_ms = row["method"], 1e3 * row["step_s"]
            colour = COLOURS.get(method, "C2")
            axes.barh(y, step_ms, color=colour, alpha=1.0 if row["fits"] else 0.3)
            shown = f"{step_ms:.0f}" if step_ms >= 100 else f"{step_ms:.3g}"
            note = f"{shown} ms, omega {row['omega']:.2g}"
            axes.text(step_ms, y, f" {note}{'' if row['fits'] else ', does not fit'}", va="center")
        axes.set_yticks(range(len(case)), [row["method"] for row in reversed(case)])
        axes.set_xlim(0, 1.7 * max(1e3 * row["step_s"] for row in case))
        axes.set_title(_case(case[0]), fontsize=9, loc="left")
    panes[-1].set_xlabel("step, ms (simulated estimate)")
    full, best = (next(row for row in rows if row["method"] == name) for name in (FULL, EXACT))
    title = (
        f"A step of QSync's plan takes {best['step_s'] / full['step_s']:.2f} of full precision's"
    )
    if uneven := next((row for row in rows if row["method"] == UNEVEN), None):
        title += f" and {best['step_s'] / uneven['step_s']:.2f} of uneven batches'"
    save(figure, path, f"{title} (simulated estimate)")


def _case(row: Row) -> str:
    shares = ", ".join(
        f"{kind} with {100 * n:g} % of its memory" for kind, n in row["shares"].items()
    )
    return row["cluster"] + (f", {shares}" if shares else "")


# ---- tables of documents


def plans(path: Path) -> str:
    """Returns the ways to run each case beside each other."""

    def precisions(row: Row) -> str:
        weak = (kind for kind in row["precisions"] if kind not in row["strong"])
        return "; ".join(_counts(row["precisions"][kind]) for kind in weak)

    def memory(row: Row) -> str:
        weak = [kind for kind in row["precisions"] if kind not in row["strong"]]
        sizes = (f"{row['memory_bytes'][kind] / 1e9:.1f} GB" for kind in weak)
        return ", ".join(sizes) + ("" if row["fits"] else ", does not fit")

    return table(
        path,
        {
            "cluster": _case,
            "way": "method",
            "step, ms": lambda row: round(1e3 * row["step_s"]),
            "sum of omega": lambda row: f"{row['omega']:.2g}",
            "memory of a weak device": memory,
            "rows of a device": lambda row: "/".join(f"{n:g}" for n in row["rows"].values()),
            "products of the weak kind": precisions,
        },
    )


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {p}" for p, n in sorted(counts.items()))


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Returns {name of a table: a function that returns it}."""
    return {"qsync_plans": functools.partial(plans, results / "qsync.json")}
