"""Measures the source: sizes, names, what an import loads, and the files that a flow goes through.

    uv run scripts/house.py                  # counts by reading the source; nothing is imported
    uv run scripts/house.py --flows          # also runs six flows on CPU devices, about a minute
    uv run scripts/house.py --flows --out=experiments/results --label=after

--out writes the figures under --label into house.json of that folder, beside those of other labels.
A function's lines are those of its body and one for its head. A name is counted where it is bound.
A module is private if its package does not list it among its public names.

A flow is a call of this library that is followed through the files of megajax, in all threads. A
function is counted when the flow enters it for the first time, as a reader reads it once. A
transition is an entry into another file than the one before; it is a return if the flow has been in
that file before. JAX programs are traced and, where nothing runs them, not compiled.
"""

import megajax.core.interrupted  # noqa: F401

import ast
import asyncio
import contextlib
import inspect
import json
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import CodeType
from typing import Any

from absl import flags

from megajax.core import config, files
from megajax.monitor import results

ROOT = Path(__file__).parent.parent
AREAS = ("megajax", "pallas_kernels", "experiments", "scripts", "tests")
BANNED = frozenset(
    "found own given kept wanted whole rest way turn beside here mine led let_go".split()
)
ENTRIES = {
    "pretrain": "experiments.pretrain",
    "plan": "experiments.plan",
    "serve": "scripts.serve",
}
ROOMS = ("megajax.serving", "megajax.systems.minder")  # that an entry may load without use
SMALL = 120  # lines below which a private module with one importer is listed
SKIP = "# fmt: " + "skip"
MAX_RESULTS = 2**24  # (chosen) bytes of house.json
Function = ast.FunctionDef | ast.AsyncFunctionDef
BINDERS: dict[type[ast.AST], str] = {  # kinds of nodes that bind a name -> the field that has it
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
    ast.arg: "arg",
    ast.alias: "asname",
    ast.ExceptHandler: "name",
    ast.MatchAs: "name",
    ast.MatchStar: "name",
    ast.Name: "id",
    ast.Attribute: "attr",
}


# ---- counts from the source


def sources(area: str, root: Path = ROOT) -> list[Path]:
    """Returns the Python files of a top-level folder."""
    return sorted((root / area).rglob("*.py"))


def module_name(path: Path, root: Path = ROOT) -> str:
    """Returns the dotted name of a file; of a package, that of its folder."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def functions(tree: ast.AST) -> list[Function]:
    """Returns all functions and methods, nested ones too."""
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def function_lines(node: Function) -> int:
    """Returns the lines of a function's body, and one for its head."""
    return (node.end_lineno or node.lineno) - node.body[0].lineno + 2


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yields each name where it is bound: variables, functions, parameters, members."""
    for node in ast.walk(tree):
        field = BINDERS.get(type(node))
        if field is None or isinstance(getattr(node, "ctx", None), ast.Load | ast.Del):
            continue
        if name := getattr(node, field):
            yield name


def banned_names(tree: ast.AST) -> Counter[str]:
    """Returns {banned name: how often it is bound}; `_found` is `found`."""
    return Counter(bare for name in bound_names(tree) if (bare := name.strip("_")) in BANNED)


def imports(tree: ast.AST, into_functions: bool = True) -> list[tuple[str, int]]:
    """Returns (dotted name, line) of what is imported; `from a import b` gives a.b.

    into_functions: also what functions import, and what only a type checker does.
    """
    names: list[tuple[str, int]] = []
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif into_functions or not isinstance(node, Function | ast.Lambda):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                nodes += ast.iter_child_nodes(node) if into_functions else node.orelse
            else:
                nodes += ast.iter_child_nodes(node)
    return sorted(names, key=lambda pair: pair[1])


def spread(values: list[int]) -> dict[str, float]:
    """Returns the sum, the median and the 90th percentile."""
    if len(values) < 2:
        return dict.fromkeys(("sum", "median", "p90"), sum(values))
    p90 = statistics.quantiles(values, n=10, method="inclusive")[-1]
    return {"sum": sum(values), "median": statistics.median(values), "p90": round(p90)}


class Tree:
    """The modules of a checkout, parsed."""

    def __init__(self, root: Path = ROOT):
        """Reads every file once."""
        self.paths = {module_name(p, root): p for area in AREAS for p in sources(area, root)}
        self.texts = {name: path.read_text() for name, path in self.paths.items()}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.lines = {name: len(text.splitlines()) for name, text in self.texts.items()}
        self._public = {name: self._listed(name) for name in self.paths}

    def _listed(self, package: str) -> dict[str, str]:
        """Returns {public name: module} of what a package loads on first use (core/lazy.py)."""
        if self.paths[package].name != "__init__.py":
            return {}
        calls = [n for n in ast.walk(self.trees[package]) if isinstance(n, ast.Call)]
        tables = [
            ast.literal_eval(call.args[1])
            for call in calls
            if ast.unparse(call.func) == "public" and len(call.args) > 1
        ]
        return {
            name: f"{package}.{part}"
            for table in tables
            for part, names in table.items()
            for name in names
        }

    def modules(self, dotted: str) -> set[str]:
        """Returns the modules that an import of a dotted name loads: its packages too."""
        loaded: set[str] = set()
        parts = dotted.split(".")
        for k in range(1, len(parts) + 1):
            name = ".".join(parts[:k])
            if name in self.paths:
                loaded.add(name)
            elif (package := ".".join(parts[: k - 1])) in self.paths:
                if (module := self._public[package].get(parts[k - 1])) is not None:
                    loaded.add(module)
        return loaded

    def closure(self, entry: str) -> set[str]:
        """Returns the modules that are loaded with an entry by imports at the top of modules.

        Of the entry itself the imports inside of functions count too: a script may have its own
        there.
        """
        seen: set[str] = set()
        todo = {entry} | set().union(*(self.modules(m) for m, _ in imports(self.trees[entry])))
        while todo:
            name = todo.pop()
            seen.add(name)
            named = imports(self.trees[name], into_functions=False)
            todo |= set().union(*(self.modules(m) for m, _ in named)) - seen
        return seen

    def single_importers(self) -> dict[str, dict[str, Any]]:
        """Returns the small private modules of the packages that one module alone imports."""
        importers: dict[str, set[str]] = {name: set() for name in self.paths}
        public = {module for listed in self._public.values() for module in listed.values()}
        for name, tree in self.trees.items():
            if not name.startswith("tests"):
                for module in set().union(*(self.modules(m) for m, _ in imports(tree))) - {name}:
                    importers[module].add(name)
        return {
            name: {"lines": self.lines[name], "importer": min(users)}
            for name, users in importers.items()
            if name.startswith(("megajax", "pallas_kernels"))
            and self.paths[name].name != "__init__.py"
            and len(users) == 1
            and name not in public
            and self.lines[name] < SMALL
        }

    def counts(self) -> dict[str, Any]:
        """Returns all figures that need no run."""
        areas, names = {}, {}
        for area in AREAS:
            of = [n for n in self.paths if n.split(".")[0] == area]
            lengths = [function_lines(f) for n in of for f in functions(self.trees[n])]
            banned = sum((banned_names(self.trees[n]) for n in of), Counter())
            areas[area] = {
                "files": len(of),
                "lines": sum(self.lines[n] for n in of),
                "functions": len(lengths),
                "function_lines": spread(lengths),
                "file_lines": spread([self.lines[n] for n in of]),
                "fmt_skips": sum(self.texts[n].count(SKIP) for n in of),
                "banned_names": banned.total(),
            }
            names[area] = dict(sorted(banned.items()))
        small = self.single_importers()
        return {
            "areas": areas,
            "banned_names": names,
            "closures": {entry: self._loaded(name) for entry, name in ENTRIES.items()},
            "single_importers": {
                "files": len(small),
                "lines": sum(module["lines"] for module in small.values()),
                "modules": small,
            },
        }

    def _loaded(self, entry: str) -> dict[str, Any]:
        seen = self.closure(entry)

        def part(prefix: str) -> dict[str, int]:
            of = [n for n in seen if n == prefix or n.startswith(f"{prefix}.")]
            return {"modules": len(of), "lines": sum(self.lines[n] for n in of)}

        kernels = sorted({n.split(".")[1] for n in seen if n.startswith("pallas_kernels.")})
        rooms = {room: part(room) for room in (*ROOMS, "pallas_kernels")}
        return {
            "modules": len(seen),
            "lines": sum(self.lines[n] for n in seen),
            "rooms": rooms,
            "kernels": [k for k in kernels if f"pallas_kernels.{k}.api" in self.paths],
        }


# ---- flows


class Walk:
    """Follows the calls of all threads through the files of megajax between `start` and `stop`."""

    def __init__(self, known: "Walk | None" = None):
        """known: a walk whose functions are not counted again."""
        self._threads: list[list[CodeType]] = []
        self._local = threading.local()
        self._known = known.functions if known else set()

    @property
    def functions(self) -> set[CodeType]:
        """The functions that were entered."""
        return set().union(*self._threads)

    def start(self) -> None:
        """Begins to follow."""
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.PROFILER_ID, "house")
        start = monitoring.events.PY_START
        monitoring.register_callback(monitoring.PROFILER_ID, start, self._enter)
        monitoring.set_events(monitoring.PROFILER_ID, start)
        monitoring.restart_events()

    def stop(self) -> None:
        """Ends it."""
        sys.monitoring.set_events(sys.monitoring.PROFILER_ID, 0)
        sys.monitoring.free_tool_id(sys.monitoring.PROFILER_ID)

    def __enter__(self) -> "Walk":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _enter(self, code: CodeType, offset: int) -> Any:
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # a module and a class body have none
        if not is_function or not code.co_filename.startswith(f"{ROOT}/megajax/"):
            return sys.monitoring.DISABLE
        if not hasattr(self._local, "entered"):
            self._local.entered = []
            self._threads.append(self._local.entered)
        self._local.entered.append(code)

    def figures(self) -> dict[str, Any]:
        """Returns the files in the order of their first entry, transitions and returns."""
        seen, files = set(self._known), {}
        transitions = returns = entered = calls = 0
        for thread in self._threads:
            last = None
            for code in thread:
                calls += 1
                if code in seen:
                    continue
                seen.add(code)
                entered += 1
                name = code.co_filename.removeprefix(f"{ROOT}/")
                if name != last and last is not None:
                    transitions += 1
                    returns += name in files
                files[name] = last = name
        return {
            "files": len(files),
            "functions": entered,
            "transitions": transitions,
            "returns": returns,
            "calls": calls,
            "names": list(files),
        }


def run_flows() -> dict[str, Any]:
    """Returns the figures of the six flows."""
    with tempfile.TemporaryDirectory() as name:
        job, data, checkpoints = (Path(name, part) for part in ("job", "data", "checkpoints"))
        for folder in (job, data):
            folder.mkdir()
        alert = _alert(job)  # before jax starts its threads: an agent forks
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 4)
        walks: dict[str, Walk] = {}
        walks["batch to loss"] = _batch_to_loss(data)
        walks["gradient to update"] = _gradient_to_update(walks["batch to loss"])
        walks["save"], walks["restore"] = _checkpoint(checkpoints)
        walks["served request"] = _request()
    walks["alert to action"] = alert
    return {name: walk.figures() for name, walk in walks.items()}


def _run(**changes: Any) -> Any:
    """Returns the configuration of a run of a tiny decoder; '__' stands for the dot of a flag."""
    from megajax.models.decoder_config import DecoderConfig
    from megajax.training.config import Config, TrainConfig

    model = DecoderConfig(
        layers=2, width=32, heads=4, kv_heads=4, head_width=8, mlp=64, vocab=259, max_positions=128
    )
    base = Config(model=model, train=TrainConfig(steps=2, global_batch=4, seq_len=16))
    return config.override(base, {k.replace("__", "."): v for k, v in changes.items()})


def _batch_to_loss(folder: Path) -> Walk:
    """Text of files, packed, placed, and the loss of the model; one device."""
    from megajax.data.corpus import open_corpora
    from megajax.data.loader import Loader, training_rows
    from megajax.training.step import make_train_step

    for number in range(8):
        (folder / f"{number}.txt").write_text(f"A text with the number {number}. " * 20)
    cfg = _run(mesh__data=1, data__source=str(folder))
    step = make_train_step(cfg, cfg.mesh.build())
    corpora, _ = open_corpora(cfg.data, folder / "cache", lambda _: None, cfg.model.vocab)
    with Walk() as walk:
        rows = training_rows(corpora, cfg.train.seq_len, cfg.train.seed)
        next(Loader(rows, step.abstract_batch, order=step.storage.tokens))
        step.evaluate.lower(step.abstract_state.params, step.abstract_eval_batch)
    return walk


def _gradient_to_update(loss: Walk) -> Walk:
    """A whole step with --wire=sdp4bit on two nodes, without what belongs to the loss."""
    from megajax.training.step import make_train_step

    cfg = _run(mesh__node=2, mesh__data=2, wire="sdp4bit")
    step = make_train_step(cfg, cfg.mesh.build())
    with Walk(known=loss) as walk:
        step.step.lower(step.abstract_state, step.abstract_batch)
    return walk


def _checkpoint(folder: Path) -> tuple[Walk, Walk]:
    """Returns (a save that is read back, a restore) of a train state on one device."""
    from megajax.checkpoint.manager import CheckpointManager
    from megajax.training.step import make_train_step

    cfg = _run(mesh__data=1)
    step = make_train_step(cfg, cfg.mesh.build())
    state, like, order = vars(step.init(0)), vars(step.abstract_state), step.rows
    with Walk() as save:
        manager = CheckpointManager(folder)
        manager.save(1, state, data_state={"rows": 4}, order=order).result()
        manager.close()
    with Walk() as restore:
        manager = CheckpointManager(folder)
        manager.restore(like=like, order=order)
        manager.data_state(1)
        manager.close()
    return save, restore


def _request() -> Walk:
    """A completion of the HTTP interface, asked in this process."""
    import httpx2
    import jax

    from megajax.data.tokenizer import ByteTokenizer
    from megajax.models import decoder
    from megajax.serving import Engine
    from megajax.systems.server.launch import build_server
    from megajax.systems.server.options import HttpOptions

    model = _run().model
    params = jax.jit(decoder.parts(model).init)(jax.random.key(0))
    engine = Engine(
        model,
        params,
        dtype="float32",
        max_batch=2,
        prefill_chunk=16,
        page_size=8,
        pages=40,
        tokenizer=ByteTokenizer(),
    )

    async def ask() -> Walk:
        worker, server = build_server(engine, "tiny", None, HttpOptions(), max_batch=2)
        worker.start()
        transport = httpx2.ASGITransport(app=server.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://tiny") as client:
            with Walk() as walk:
                body = {"prompt": "import ", "max_tokens": 4}
                (await client.post("/v1/completions", json=body)).raise_for_status()
        worker.stop()
        await worker.join(60)
        return walk

    return asyncio.run(ask())


def _alert(folder: Path) -> Walk:
    """A supervised command fails, its job is started again and ends; driver and agent are threads.

    The walk begins once the command runs, before it fails.
    """
    sys.path.insert(0, str(ROOT / "scripts"))
    import supervise

    failed, walk = folder / "failed", Walk()
    program = (
        f"import os, sys, time\nif os.path.exists({str(failed)!r}): sys.exit(0)\n"
        f"open({str(failed)!r}, 'w').close(); time.sleep(2); sys.exit(1)"
    )
    with contextlib.closing(supervise.listen("127.0.0.1:0")) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(16))
    common = [f"--token_file={secret}", "--join_s=60", "--period_s=0.2"]
    words = ["--agents=elsewhere", f"--listen={address}", f"--out={folder / 'job'}", *common]
    words += ["--backoff_s=0", "--silence_s=5", "--", sys.executable, "-c", program]
    codes = []

    def begin() -> None:
        while not failed.exists():
            time.sleep(0.05)
        walk.start()

    # Only a main thread may handle signals, and the agent does; the driver does not where they are
    # ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threads = [threading.Thread(target=lambda: codes.append(supervise.main(words)))]
    threads.append(threading.Thread(target=begin, daemon=True))
    with contextlib.redirect_stdout(sys.stderr):
        for thread in threads:
            thread.start()
        supervise.main([f"--agent={address}", "--name=host", "--rejoin_s=0", *common])
        threads[0].join()
    walk.stop()
    if codes != [0]:
        raise RuntimeError(f"the supervised command ended with {codes}")
    return walk


# ---- what is shown


def table(figures: dict[str, Any]) -> str:
    """Returns the figures as text in columns."""
    areas = [
        {"area": area, **row}
        | {
            f"{of} {k}": row[f"{of}_lines"][k]
            for of in ("function", "file")
            for k in ("median", "p90")
        }
        for area, row in figures["areas"].items()
    ]
    shown = ["area", "files", "lines", "functions", "function median", "function p90"]
    shown += ["file median", "file p90", "banned_names", "fmt_skips"]
    names = sum((Counter(of) for of in figures["banned_names"].values()), Counter())
    loaded = [
        {"entry": entry, "modules": row["modules"], "lines": row["lines"]}
        | {room.split(".")[-1]: part["lines"] for room, part in row["rooms"].items()}
        | {"kernels": len(row["kernels"])}
        for entry, row in figures["closures"].items()
    ]
    small = figures["single_importers"]
    parts = [
        results.columns(areas, {name: name for name in shown}),
        "banned names: " + ", ".join(f"{name} {n}" for name, n in names.most_common()),
        "loaded by imports, in lines:\n" + results.columns(loaded, {n: n for n in loaded[0]}),
        f"private modules under {SMALL} lines with one importer: {small['files']}, "
        f"{small['lines']} lines",
    ]
    if walks := figures.get("flows"):
        rows = [{"flow": name, **row} for name, row in walks.items()]
        heads = ("flow", "files", "functions", "transitions", "returns", "calls")
        parts.append(results.columns(rows, {name: name for name in heads}))
    return "\n\n".join(parts)


def define_flags() -> None:
    """Defines the flags of this script. Tests import it beside others that have flags so called."""
    flags.DEFINE_boolean("json", False, "print JSON in place of the table")
    flags.DEFINE_boolean("flows", False, "also run the six flows")
    flags.DEFINE_string("out", None, "folder in which house.json gets the figures")
    flags.DEFINE_string("label", "now", "name of the figures in house.json")


def main() -> int:
    """Counts, shows and writes."""
    asked = flags.FLAGS
    figures = {"date": date.today().isoformat(), "commit": results.commit(), **Tree().counts()}
    if asked.flows:
        figures["flows"] = run_flows()
    if asked.out is not None:
        path = results.writable_folder(asked.out) / "house.json"
        former = files.read_object(path, MAX_RESULTS) if path.exists() else {}
        files.write_whole(path, files.json_text(former | {asked.label: figures}))
        print(path, file=sys.stderr)
    print(json.dumps(figures, indent=1) if asked.json else table(figures))
    return 0


if __name__ == "__main__":
    define_flags()
    sys.exit(config.run(main))
