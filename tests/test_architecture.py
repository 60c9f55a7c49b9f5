"""The house's rules, read from the source: floors, sizes, no module-level mutable state."""

import ast
import functools
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from megajax.core.axes import LETTERS
from scripts import house
from scripts.house import ROOT, SKIP, imports, module_name

SOURCES = sorted(path for area in house.AREAS for path in house.sources(area))
LIBRARY = [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("megajax", "pallas_kernels")]
LIBRARY += [p for p in SOURCES if p.parent.parent == ROOT / "experiments"]  # not its scripts

# The most that a folder may have: bindings of banned names (house.BANNED), tables packed under a
# `fmt` comment, and functions. These numbers only fall. `scripts/house.py` prints today's.
LIMITS = {
    # functions: 4,624 when reinforcement learning, a new system, came;
    # 4,949 when a detector of butterflies, another one, began;
    # 5,184 with its data and networks, then its training;
    # 5,254 when models that read images came: tower, data, engine, server;
    # 5,533 before an encoder worked in a pipeline's bubbles: its planner, its execution;
    # 5,656 before one job trained on unlike GPUs: its replay, the choice of precisions;
    # 5,843 before models were evaluated: perplexity, choices, exact match, LLM
    "megajax": {"banned_names": 4, "fmt_skips": 41, "functions": 6301},
    "pallas_kernels": {"banned_names": 1, "fmt_skips": 6},
    "experiments": {"banned_names": 0, "fmt_skips": 6},
    "scripts": {"banned_names": 25, "fmt_skips": 7},
    "tests": {"banned_names": 1, "fmt_skips": 65},
}

# From the ground up. A module may import its own folder and the floors below it.
FLOORS = [
    {"pallas_kernels"},
    {"megajax.core"},
    {"megajax.cost", "megajax.schedule", "megajax.quant", "megajax.search"},
    {"megajax.layers"},
    {"megajax.models"},
    {"megajax.parallel"},
    {"megajax.serving", "megajax.data", "megajax.checkpoint", "megajax.foreign", "megajax.monitor"},
    {"megajax.training", "megajax.evaluation"},
    {"megajax.systems"},
    {"megajax.llm"},
    {"experiments"},
    {"scripts", "tests"},
]
RANK = {name: rank for rank, names in enumerate(FLOORS) for name in names}
# Pairs of one floor that may import each other: a script breaks what the tests' servers serve, and
# tests check what scripts measure. A GGUF file has its tokenizer in it; a stored step is exported
# as safetensors, and two public names of other people's files are modules of checkpoint. A replay's
# step time comes from the simulator that times schedules. An engine cuts images as training does,
# and reads adapters of PEFT's folders.
SAME_FLOOR = {
    ("scripts", "tests"),
    ("tests", "scripts"),
    ("megajax.checkpoint", "megajax.foreign"),
    ("megajax.foreign", "megajax.data"),
    ("megajax.serving", "megajax.data"),
    ("megajax.serving", "megajax.foreign"),
    ("megajax.cost", "megajax.schedule"),
}

# A driver starts these in a tenth of a second and never touches a device.
JAX_FREE = (
    "megajax.commands",
    "megajax.checkpoint.agreement",
    "megajax.checkpoint.steps",
    "megajax.checkpoint.trust",
    "megajax.checkpoint.layouts",
    "megajax.checkpoint.memory_tier",
    "megajax.checkpoint.offline",
    "megajax.checkpoint.planner",
    "megajax.checkpoint.store",
    "megajax.core.boxes",
    "megajax.core.config",
    "megajax.core.script",
    "megajax.core.placeholders",
    "megajax.core.errors",
    "megajax.core.axes",
    "megajax.core.check",
    "megajax.core.hardware",
    "megajax.cost.base",
    "megajax.cost.estimate",
    "megajax.cost.traffic",
    "megajax.cost.kernels",
    "megajax.cost.memory",
    "megajax.cost.roofline",
    "megajax.cost.step",
    "megajax.cost.record",
    "megajax.cost.replay",
    "megajax.cost.serving",
    "megajax.cost.sparse",
    "megajax.cost.table",
    "megajax.foreign.gguf_file",
    "megajax.foreign.pickles",
    "megajax.foreign.readers",
    "megajax.foreign.safetensors",
    "megajax.foreign.torch_files",
    "megajax.monitor.alerts",
    "megajax.monitor.detectors",
    "megajax.monitor.meter",
    "megajax.monitor.timeline",
    "megajax.monitor.exporter",
    "megajax.monitor.faults",
    "megajax.monitor.samples",
    "megajax.monitor.fleet",
    "megajax.monitor.fleet.simulator",
    "megajax.monitor.heartbeat",
    "megajax.monitor.records",
    "megajax.monitor.minder_config",
    "megajax.monitor.slow_rank",
    "megajax.monitor.samples",
    "megajax.monitor.sources.http_query",
    "megajax.monitor.sources.convert",
    "megajax.monitor.sources.files",
    "megajax.monitor.sources.server",
    "megajax.monitor.timers",
    "megajax.schedule",
    "megajax.schedule.bubbles",
    "megajax.schedule.build",
    "megajax.schedule.ir",
    "megajax.schedule.simulator",
    "megajax.schedule.trace",
    "megajax.search.assign",
    "megajax.search.program",
    "megajax.serving",
    "megajax.serving.scheduler",
    "megajax.serving.params",
    "megajax.serving.scheduler",
    "megajax.serving.constraint",
    "megajax.systems.elastic.agent",
    "megajax.systems.elastic.driver",
    "megajax.systems.elastic.local",
    "megajax.systems.elastic.policy",
    "megajax.systems.elastic.wire",
    "megajax.systems.elastic.events",
    "megajax.systems.elastic.checks",
    "megajax.systems.llm_pq.planning",
    "megajax.systems.llm_pq.problem",
    "megajax.systems.llm_pq.rivals",
    "megajax.systems.minder.child",
    "megajax.systems.minder.run",
    "megajax.systems.qsync.allocator",
    "megajax.systems.qsync.graph",
)


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(autouse=True, scope="module")
def forget_trees():
    """The trees of all files take half a gigabyte."""
    yield
    parsed.cache_clear()


MEASURES = {
    "banned_names": lambda path: house.banned_names(parsed(path)).total(),
    "fmt_skips": lambda path: path.read_text().count(SKIP),
    "functions": lambda path: len(house.functions(parsed(path))),
}


def ratchet_violations(paths: list[pathlib.Path], measure: str, limit: int) -> list[str]:
    """Returns nothing, or that the files have too many and how many each of them has."""
    counts = {path: MEASURES[measure](path) for path in paths}
    if (total := sum(counts.values())) <= limit:
        return []
    parts = [f"  {path.relative_to(ROOT)}: {count}" for path, count in counts.items() if count]
    return [f"{measure}: {total} in place of at most {limit}", *parts]


@pytest.mark.parametrize("area, measure", [(a, m) for a, of in LIMITS.items() for m in of])
def test_counts_only_fall(area, measure):
    violations = ratchet_violations(house.sources(area), measure, LIMITS[area][measure])
    assert not violations, "\n".join(violations)


def test_a_count_that_rises_is_noticed():
    path = ROOT / "scripts" / "house.py"
    functions = len(house.functions(parsed(path)))
    assert ratchet_violations([path], "functions", functions) == []
    assert ratchet_violations([path], "functions", functions - 1) == [
        f"functions: {functions} in place of at most {functions - 1}",
        f"  scripts/house.py: {functions}",
    ]


def floor_of(module: str) -> str | None:
    parts = module.split(".")
    names = (".".join(parts[:k]) for k in range(len(parts), 0, -1))
    return next((n for n in names if n in RANK), None)


def floor_violations(path: pathlib.Path, tree: ast.AST) -> list[str]:
    floor = floor_of(module_name(path))
    if floor is None:
        return []
    return [
        f"{path.name}:{line}: {floor} may not import {other}"
        for module, line in imports(tree)
        if (other := floor_of(module)) is not None
        and other != floor
        and RANK[other] >= RANK[floor]
        and (floor, other) not in SAME_FLOOR
    ]


def test_floors():
    violations = [v for p in SOURCES for v in floor_violations(p, parsed(p))]
    assert not violations, "\n".join(violations)


def test_floors_are_checked():
    """The checker sees an upward import, so a pass means something."""
    tree = ast.parse("from megajax.training import step\nimport megajax.core.tree")
    path = ROOT / "megajax" / "layers" / "mlp.py"
    assert floor_violations(path, tree) == [
        "mlp.py:1: megajax.layers may not import megajax.training"
    ]


def test_names_of_test_files_differ():
    """Test folders are no packages: pytest imports files by their names alone."""
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# Rivals that a folder's benchmark times, where they are installed: imported inside functions.
RIVALS = {
    "pallas_kernels/attention/bench.py": {"tokamax"},
    "pallas_kernels/rivals.py": {"torch"},
}


def test_kernels_stand_alone():
    allowed = {"jax", "jaxlib", "numpy", "absl", "pallas_kernels"}
    stdlib = sys.stdlib_module_names
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        tree, rivals = parsed(path), RIVALS.get(str(path.relative_to(ROOT)), set())
        for module, line in imports(tree):
            assert module.split(".")[0] in allowed | rivals | stdlib, f"{path}:{line}: {module}"
        for node in tree.body:
            names = {module.split(".")[0] for module, _ in imports(ast.Module([node], []))}
            assert isinstance(node, ast.FunctionDef) or not names & rivals, f"{path}:{node.lineno}"


def kernel_files() -> dict[str, pathlib.Path]:
    """The modules that launch kernels, by name; the engine only helps them."""
    files = {module_name(p): p for p in (ROOT / "pallas_kernels").glob("*/*.py")}
    launches = "engine.launch(", "plgpu.kernel("
    return {
        name: path
        for name, path in files.items()
        if path.parent.name != "hopper" and any(word in path.read_text() for word in launches)
    }


def kernel_violations(name: str, tree: ast.AST, kernels: set[str]) -> list[str]:
    """What a kernel's file imports of another kernel: its file, or but for the reference any of
    the files of its folder."""
    folder = name.rpartition(".")[0] + "."
    others = {kernel.rpartition(".")[0] + "." for kernel in kernels} - {folder}
    violations = []
    for module, line in imports(tree):
        away = module.startswith(tuple(others)) and not module.split(".")[2].startswith("reference")
        if away or any(module == k or module.startswith(k + ".") for k in kernels):
            violations.append(f"{name}:{line}: {module}")
    return violations


def test_no_kernel_needs_the_file_of_another():
    kernels = kernel_files()
    assert len(kernels) > 12
    violations = [
        v
        for name, path in kernels.items()
        for v in kernel_violations(name, parsed(path), set(kernels))
    ]
    assert not violations, "\n".join(violations)


def test_a_kernel_that_needs_another_is_noticed():
    kernels = {"pallas_kernels.a.hopper", "pallas_kernels.a.other", "pallas_kernels.b.hopper"}
    text = """
from pallas_kernels.a import tiling, other
from pallas_kernels.b.tiling import size
from pallas_kernels.b import reference
from pallas_kernels.hopper import engine
"""
    assert kernel_violations("pallas_kernels.a.hopper", ast.parse(text), kernels) == [
        "pallas_kernels.a.hopper:2: pallas_kernels.a.other",
        "pallas_kernels.a.hopper:3: pallas_kernels.b.tiling.size",
    ]


def test_pallas_stays_in_kernels():
    for path in (ROOT / "megajax").rglob("*.py"):
        assert "experimental.pallas" not in path.read_text(), path


def test_models_know_no_mesh():
    for folder in ("layers", "models"):
        for path in (ROOT / "megajax" / folder).rglob("*.py"):
            names = {n.id for n in ast.walk(parsed(path)) if isinstance(n, ast.Name)}
            assert not names & {"Mesh", "PartitionSpec", "NamedSharding"}, path


def test_sizes(tmp_path):
    """Size follows the concept: a file holds one, a function one recipe. These are the most."""
    texts = {path: path.read_text() for path in SOURCES}
    texts |= formatted({path: text for path, text in texts.items() if SKIP in text}, tmp_path)
    violations = [v for path, text in texts.items() for v in size_violations(path, text)]
    assert not violations, "\n".join(violations)


def formatted(texts: dict[pathlib.Path, str], folder: pathlib.Path) -> dict[pathlib.Path, str]:
    """Returns the files as the formatter would write them if nothing held it back: a comment that
    packs a table must not make room in a file."""
    copies = {path: folder / f"{number}.py" for number, path in enumerate(texts)}
    for path, copy in copies.items():
        copy.write_text(texts[path].replace(f"  {SKIP}", ""))
    shutil.copy(ROOT / "pyproject.toml", folder)
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "."], cwd=folder, check=True)
    return {path: copy.read_text() for path, copy in copies.items()}


def test_what_is_packed_is_unpacked_before_it_is_counted(tmp_path):
    packed = f"x = [\n    1, 2,\n]  {SKIP}\n"
    assert formatted({ROOT / "a.py": packed}, tmp_path)[ROOT / "a.py"].count("\n") == 4


def size_violations(path: pathlib.Path, text: str) -> list[str]:
    tree, relative = ast.parse(text), path.relative_to(ROOT)
    roomy = relative.parts[0] in ("tests", "pallas_kernels")
    violations = []
    if len(text.splitlines()) > 1200:
        violations.append(f"{relative}: too many lines")
    if len(relative.parts) > 4:
        violations.append(f"{relative}: too deep")
    if path.name == "utils.py" or re.search(r"_v\d+\.py$", path.name):
        violations.append(f"{relative}: a name that says nothing")
    for node in house.functions(tree):
        length = house.function_lines(node)
        limit = 150 if roomy else 100
        if length > limit:
            violations.append(f"{relative}: {node.name} has {length} lines")
        # A kernel's body takes a reference for each of its operands.
        body = node.name == "_body" and relative.parts[0] == "pallas_kernels"
        if body or (path.name, node.name) in MANY_PARAMETERS:
            continue
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        named = [a for a in parameters if a.arg not in ("self", "cls")]
        if len(named) > 8:
            violations.append(f"{relative}: {node.name} has {len(named)} parameters")
    return violations


def test_sizes_are_checked():
    """The checker counts keyword-only parameters and the lines of a nested function."""
    many = ", ".join(f"p{k}" for k in range(9))
    text = f"def f(*, {many}):\n    def g():\n" + "        pass\n" * 100
    assert size_violations(ROOT / "megajax" / "core" / "utils.py", text) == [
        "megajax/core/utils.py: a name that says nothing",
        "megajax/core/utils.py: f has 102 lines",
        "megajax/core/utils.py: f has 9 parameters",
        "megajax/core/utils.py: g has 101 lines",
    ]


# What takes more than eight parameters on purpose: public interfaces with many options (and what
# stands behind them with the same options), and kernels whose parameters are their whole input.
MANY_PARAMETERS: set[tuple[str, str]] = {
    ("attention.py", "attend"),
    ("context.py", "attend"),
    # Options of a public interface.
    ("collective_matmul.py", "all_gather_matmul"),
    ("expert_matmul.py", "dispatch_grouped_matmul"),
    ("pruning.py", "prune"),
    ("api.py", "varlen_attention"),
    ("api.py", "packed_attention"),
    ("api.py", "norm_unpack"),
    ("api.py", "fused_gemm"),
    ("api.py", "quant_matmul"),
    ("tensor.py", "attend"),
    ("tensor.py", "local_attend"),
    ("expert.py", "expert"),
    ("api.py", "paged_attention"),
    ("engine.py", "__init__"),
    ("runtime.py", "__init__"),
    ("server.py", "prometheus"),
    ("losses.py", "ppo"),
    ("planner.py", "plan"),
    # Kernels: operands and options of one launch.
    ("hopper.py", "multiply"),
    ("hopper.py", "multiply_scaled"),
    ("hopper.py", "forward"),
    ("hopper.py", "backward"),
    ("hopper_backward.py", "backward"),
    ("hopper_backward.py", "_varlen_attention_dq"),
    ("hopper_backward.py", "_varlen_attention_dkv"),
    ("reference.py", "backward"),
    ("all_gather_gemm.py", "all_gather_gemm"),
    ("all_gather_gemm.py", "pull"),
    ("gemm_all_reduce.py", "gemm_all_reduce"),
    ("gemm_reduce_scatter.py", "gemm_reduce_scatter"),
    ("dispatch_gemm.py", "dispatch_gemm"),
    ("gemm_combine.py", "gemm_combine"),
    ("relay.py", "relay"),
    ("rows.py", "relay"),
    # The model, the schedule and the rules of a pipeline's tick.
    ("pipeline.py", "__init__"),
    # A fused kernel's shape, for tests.
    ("kernel_cases.py", "scatter"),
    ("kernel_cases.py", "dispatch"),
    ("kernel_cases.py", "combine"),
}
MUTATING = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip


def test_no_module_level_mutable_state():
    violations = [v for p in LIBRARY for v in state_violations(p, parsed(p))]
    assert not violations, "\n".join(violations)


def state_violations(path: pathlib.Path, tree: ast.Module) -> list[str]:
    """Module-level containers are upper-case constants, and constants are only read."""
    violations = []
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        constants = all(n.lstrip("_").isupper() or n == "__all__" for n in names)
        if isinstance(node.value, ast.Dict | ast.List | ast.Set) and not constants:
            violations.append((node, f"{names}: constants are upper case"))
        made = node.value.func if isinstance(node.value, ast.Call) else None
        if isinstance(made, ast.Name) and made.id in ("dict", "list", "set", "defaultdict"):
            violations.append((node, f"{names} is a container that can change"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            violations.append((node, "uses global"))
        changed: ast.AST | None = None
        if isinstance(node, ast.Subscript | ast.Attribute):
            changed = node.value if isinstance(node.ctx, ast.Store | ast.Del) else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in MUTATING else None
        elif isinstance(node, ast.AugAssign):
            changed = node.target
        if isinstance(changed, ast.Name) and changed.id.lstrip("_").isupper():
            if len(changed.id) > 1:  # a single capital is a size: T += 1
                violations.append((node, f"changes {changed.id}"))
    return [f"{path}:{node.lineno} {text}" for node, text in violations]


@pytest.mark.parametrize(
    "line", ["T_ = 1\nTABLE[0] = 1", "TABLE.append(1)", "del _TABLE['a']", "TABLE |= {1}",
             "table = {}", "_CACHE = dict()", "def f():\n    global x", "TABLE.field = 1"],
)  # fmt: skip
def test_changing_state_is_noticed(line):
    assert len(state_violations(ROOT / "some.py", ast.parse(line))) == 1


def test_environment_is_read_in_one_place():
    readers = {p for p in LIBRARY if "os.environ" in p.read_text() or "getenv" in p.read_text()}
    allowed = (
        "megajax/commands.py",
        "megajax/core/mesh.py",
        "megajax/checkpoint/store.py",
        "pallas_kernels/aot.py",
    )
    assert readers <= {ROOT / name for name in allowed}


def test_array_names_use_known_letters():
    """`x_BSD`: suffixes of array names are letters of core/axes.py, or of the file's legend."""
    for folder in ("layers", "models"):
        for path in (ROOT / "megajax" / folder).rglob("*.py"):
            tree = parsed(path)
            _, _, legend = (ast.get_docstring(tree) or "").partition("Legend:")
            known = {*LETTERS, "1", *re.findall(r"\b[A-Z]\b", legend)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Name) and (m := re.search(r"[a-z]_([A-Z1]+)$", node.id)):
                    assert set(m[1]) <= known, f"{path}: {node.id}"


def test_jax_free_modules_do_not_load_jax():
    code = f"import sys; {'; '.join(f'import {m}' for m in JAX_FREE)}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_scripts_begin_with_what_ends_them_quietly():
    """Imports take seconds; Ctrl-C meanwhile is one line (core/interrupted.py)."""
    for path in [*(ROOT / "experiments").glob("*.py"), *(ROOT / "scripts").glob("*.py")]:
        if '__name__ == "__main__"' in path.read_text():
            first = parsed(path).body[1]
            assert ast.unparse(first) == "import megajax.core.interrupted", path


def test_nothing_names_this_machine():
    """No registry host and no path of a machine is committed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in listed.stdout.split():
        path = ROOT / name
        if path.suffix in (".npz", ".png", ".svg") or not path.is_file():
            continue
        text = path.read_bytes().decode(errors="replace")  # checkpoints are no text
        assert str(ROOT) + "/" not in text, name
        assert not re.search(r"https?://[\w.]*(pypi|pythonhosted|jfrog|artifactory)", text), name


# A description that goes on from a name ("seed: of the faults") is a riddle where the name is far
# away, as in a page of the documentation.
CONTINUES = {
    "after", "as", "at", "before", "behind", "between", "by", "from", "has", "into", "like", "of",
    "that", "to", "where", "which", "with",
}  # fmt: skip


def riddles(path: pathlib.Path, tree: ast.AST) -> list[str]:
    violations = []
    for node in ast.walk(tree):
        text, name = "", getattr(node, "name", "")
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.get_docstring(node) or ""
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.value or node).startswith(
            ("option(", "config.option(")
        ):
            assert isinstance(node.value, ast.Call)
            name, arguments = ast.unparse(node.target), node.value.args
            if len(arguments) > 1 and isinstance(arguments[1], ast.Constant):
                text = arguments[1].value
        if text and text.split()[0].lower() in CONTINUES:
            violations.append(f"{path.name}: {name}: {text.splitlines()[0]}")
    return violations


def test_descriptions_do_not_continue_names():
    product = [p for p in SOURCES if p.relative_to(ROOT).parts[0] != "tests"]
    violations = [v for p in product for v in riddles(p, parsed(p))]
    assert not violations, "\n".join(violations)


def test_a_description_that_continues_a_name_is_noticed():
    text = (
        'def rows():\n    """Of a tile."""\nclass C:\n    seed: int = option(0, "of the faults")\n'
    )
    assert len(riddles(ROOT / "a.py", ast.parse(text))) == 2
