"""Pickles read without running them: foreign checkpoints hold their structure in such a stream.

A pickle is a program; the usual reader imports and calls what it names. Here its opcodes (Python's
pickletools says what they are) build plain data only: a name of code becomes an inert `Global`, a
call of it an inert `Record`, or what a function of ours, from a table that the caller gives, makes
of the arguments. Nothing is imported, called or looked up. Opcodes that no checkpoint needs, code
outside a list of known packages are refused. So is a stream that would cost far more memory or time
than its length: each step has a price, and a stream has so many bytes to spend. No jax.
"""

import pickletools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megajax.core.errors import UserError

Builders = Mapping[str, Callable[..., Any]]

# Where the classes and functions come from whose names stand in checkpoints.
PACKAGES = frozenset(
    "argparse collections copyreg datetime enum megatron nemo numpy nvidia_resiliency_ext pathlib "
    "torch transformer_engine types _codecs _io".split()
)
BUILTINS = frozenset(
    (
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "frozenset",
        "list",
        "object",
        "set",
        "slice",
        "tuple",
    )
)
MAX_BYTES = 256 * 2**20  # (chosen: ten times the metadata of 12,288 ranks)
MAX_DEPTH = 1000  # open marks; every one is a list (chosen: pickles of nested data have tens)
MAX_INTEGER = 64  # bytes of one (chosen: generators of random numbers have 16)
MAX_STEPS = 2**25  # opcodes (chosen: a minute; the metadata of 12,288 ranks has a third of them)
MAX_TUPLE_KEYS = 8192  # (chosen) their hashes can be made to collide; the time grows as the square
MAX_INTEGER_KEY = 2**61 - 1  # CPython's hash of larger ones wraps, so they can be made to collide
SLACK = 32 * 2**20  # (chosen) bytes of memory that any stream may cost
GROWTH = 16  # (measured: torch's metadata costs 9 to 14) more, for each byte of a stream


@dataclass(frozen=True, eq=False)
class Global:
    """The name of a class, a function or a dtype, and nothing else."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """What `kind` would have been called with, the state it would have got, and its items."""

    kind: str
    args: tuple
    state: Any = None
    items: list | tuple = ()

    @property
    def last(self) -> str:
        """The name without its package."""
        return self.kind.rpartition(".")[2]

    def member(self, name: str, default: Any = None) -> Any:
        """Returns a member of the object's dictionary."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


def loads(
    data: bytes,
    where: str,
    builders: Builders | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns what a pickle holds: plain data, Globals, Records and what `builders` make.

    Args: where: names the source in errors. builders: {dotted name: our function of the call's
    arguments}. persistent: makes a value of a persistent id.
    Raises: UserError for a stream that is damaged, refused or too large.
    """
    if len(data) > MAX_BYTES:
        raise UserError(f"{where}: a pickle of {len(data):,} bytes; {MAX_BYTES:,} are read at most")
    reader = _Reader(dict(_BUILDERS) | dict(builders or {}), persistent, len(data))
    try:
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return reader.stack.pop()
            if number == MAX_STEPS:
                raise _Refused(f"more than {MAX_STEPS:,} opcodes")
            step = _STEPS.get(opcode.name)
            if step is None:
                raise _Refused(f"opcode {opcode.name} has no place in a checkpoint")
            step(reader, argument)
    except _Refused as error:
        raise UserError(f"{where}: refused: {error}; nothing was run") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        reason = type(error).__name__ if len(str(error)) > 200 else error
        raise UserError(f"{where} is damaged: its pickle cannot be read ({reason})") from None
    raise UserError(f"{where} is damaged: its pickle has no end")


class _Refused(Exception):
    """An instruction of pickle that no checkpoint needs."""


class _Reader:
    """The machine that pickle describes: a stack, stacks below marks, a memo."""

    def __init__(self, builders: Builders, persistent: Callable[[Any], Any] | None, size: int):
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: list[Any] = []  # writers number what they keep from 0
        self.builders = builders
        self.persistent = persistent
        self.budget = self.left = SLACK + GROWTH * size
        self.tuple_keys = 0

    def spend(self, nbytes: int) -> None:
        """Pays for memory, and so for the time to fill it, before it is taken."""
        self.left -= nbytes
        if self.left < 0:
            raise _Refused(f"it would take more than {self.budget:,} bytes of memory")

    def push(self, value: Any) -> None:
        """Pushes a value and pays for its memory. Raises: _Refused if the budget is spent."""
        # CPython has these integers once, however often they are pushed, so they cost no memory.
        if type(value) is int and 0 <= value <= 256:
            return self.stack.append(value)
        if type(value) is int and value.bit_length() > 8 * MAX_INTEGER:
            raise _Refused(f"an integer of {value.bit_length() // 8:,} bytes")
        self.spend(sys.getsizeof(value))
        self.stack.append(value)

    def push_shared(self, value: Any) -> None:
        """Pushes a value of which the interpreter has only one; its memory is not counted."""
        self.stack.append(value)

    def key(self, x: Any) -> Any:
        """Returns a key whose hash costs nothing and that no other was made to collide with.

        Nested tuples can take for ever to hash, or the process.
        """
        if type(x) is int:
            if abs(x) >= MAX_INTEGER_KEY:
                raise _Refused(f"a key of {x.bit_length()} bits")
        elif isinstance(x, tuple):
            self.tuple_keys += 1
            if self.tuple_keys > MAX_TUPLE_KEYS or len(x) > 64:
                raise _Refused(f"more than {MAX_TUPLE_KEYS:,} tuples as keys, or a long one")
        flat = x if isinstance(x, tuple) else (x,)
        if not all(isinstance(m, str | int | float | bytes | Global | Record | None) for m in flat):
            raise ValueError(f"a key of type {type(x).__name__}")
        return x

    def grown(self, target: list | dict | set, before: int) -> None:
        """Pays for what a container has grown to; what it holds was paid for."""
        self.spend(sys.getsizeof(target) - before)

    def mark(self, _: Any) -> None:
        self.spend(72)
        if len(self.below) == MAX_DEPTH:
            raise _Refused(f"more than {MAX_DEPTH} levels")
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.below.pop()
        return items

    def drop_mark(self, _: Any) -> None:
        self.since_mark()

    def drop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def tuple_of(self, size: int) -> None:
        if len(self.stack) < size:
            raise ValueError("too few values")
        self.spend(56 + 8 * size)
        self.stack[len(self.stack) - size :] = [tuple(self.stack[len(self.stack) - size :])]

    def tuple_since_mark(self, _: Any) -> None:
        values = self.since_mark()
        self.push(tuple(values))

    def name(self, module: Any, attribute: Any) -> None:
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise ValueError("a name that is no text")
        self.spend(128 + 4 * (len(module) + len(attribute)))
        name = f"{module}.{attribute}"
        if module == "builtins":
            module, name = "__builtin__", f"__builtin__.{attribute}"  # as older protocols say it
        if module == "__builtin__":
            known = attribute in BUILTINS
        else:
            known = name in self.builders or module.partition(".")[0] in PACKAGES
        if not known:
            raise _Refused(f"it names {name[:200]!r}, which is code that no checkpoint needs")
        self.stack.append(Global(name))

    def stack_name(self, _: Any) -> None:
        attribute, module = self.stack.pop(), self.stack.pop()
        self.name(module, attribute)

    def call(self, _: Any) -> None:
        args, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Global) or not isinstance(args, tuple):
            raise _Refused("a call of what is no name")
        builder = self.builders.get(kind.name)
        self.spend(80 if builder is None else 16 + sum(_price(a, builder) for a in args))
        if builder in _FILLERS and args:
            for x in args[0]:
                self.key(x[0] if builder is _ordered else x)
        self.stack.append(Record(kind.name, args) if builder is None else builder(*args))

    def call_with_names(self, _: Any) -> None:
        named = self.stack.pop()
        if not isinstance(named, dict):
            raise ValueError("names of arguments that are no dictionary")
        self.call(None)
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = named

    def build(self, _: Any) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.state = state  # of other values: attributes that no reader of ours wants

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record):
            self._add_items(target, values)
        elif isinstance(target, list):
            before = sys.getsizeof(target)
            target.extend(values)
            self.grown(target, before)
        else:
            raise ValueError("appends to what is no list")

    def put_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if len(values) % 2:
            raise ValueError("a key without a value")
        pairs = zip(values[::2], values[1::2], strict=True)
        if isinstance(target, Record):
            self._add_items(target, list(pairs))
        elif isinstance(target, dict):
            before = sys.getsizeof(target)
            target.update((self.key(k), v) for k, v in pairs)
            self.grown(target, before)
        else:
            raise ValueError("sets items of what is no dictionary")

    def _add_items(self, target: Record, values: list[Any]) -> None:
        self.spend(72 * (1 + len(values)))
        if isinstance(target.items, list):
            target.items.extend(values)
        else:
            target.items = values

    def add(self, _: Any) -> None:
        values = self.since_mark()
        target = self.stack[-1]
        if not isinstance(target, set):
            raise ValueError("adds to what is no set")
        before = sys.getsizeof(target)
        target.update(self.key(x) for x in values)
        self.grown(target, before)

    def frozen(self, _: Any) -> None:
        self.push(frozenset(map(self.key, self.since_mark())))

    def remember(self, place: int | None) -> None:
        if place is None or place == len(self.memo):
            self.spend(8)
            self.memo.append(self.stack[-1])
        elif place < len(self.memo):
            self.memo[place] = self.stack[-1]
        else:
            raise ValueError("a memo that is not in order")

    def recall(self, place: int) -> None:
        self.push_shared(self.memo[place])

    def persist(self, _: Any) -> None:
        if self.persistent is None:
            raise _Refused("a persistent id where there is nothing to refer to")
        self.stack.append(self.persistent(self.stack.pop()))


def _price(argument: Any, builder: Callable[..., Any]) -> int:
    """Returns the bytes, or as many steps, that a call of ours may take because of an argument."""
    if not isinstance(argument, _SIZED):
        return 8 if isinstance(argument, _PLAIN) else 256  # of a storage: a tensor is made of it
    if isinstance(argument, str | bytes | bytearray):
        return 2 * len(argument)
    if builder in _FILLERS:
        return 128 * len(argument)
    if isinstance(argument, tuple):  # of arguments with a storage: a tensor is made of them
        simple = all(isinstance(m, _PLAIN) for m in argument)
        return 2 * len(argument) + (0 if simple else 256)
    return 16 * len(argument)


_PLAIN = (int, float, type(None), Global)
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)


def _ordered(pairs: Any = ()) -> dict:
    """Makes a plain dictionary of an OrderedDict's pairs."""
    return dict(pairs)


def _make(kind: Any, *_: Any) -> Record:
    """Makes the record of copyreg's reconstructor, which older protocols call."""
    return Record(kind.name, ())


def _encode(text: str, code: str = "latin1") -> bytes:
    """Makes bytes as Python 3 spells them for older protocols."""
    return text.encode("latin1") if code == "latin1" else b""


def _set(values: Any = ()) -> set:
    return set(values)


def _frozenset(values: Any = ()) -> frozenset:
    return frozenset(values)


_FILLERS = (_ordered, _set, _frozenset)  # each value takes a place in a table
_BUILDERS: Builders = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *_: {},  # its items follow
    "copyreg._reconstructor": _make,
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",
    "__builtin__.set": _set,
    "__builtin__.frozenset": _frozenset,
}


def _constants() -> dict[str, Callable[[_Reader, Any], None]]:
    def constant(make: Callable[[], Any]) -> Callable[[_Reader, Any], None]:
        return lambda reader, _: reader.push(make())

    makers = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
    shared = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
    return {name: constant(make) for name, make in makers.items()} | {
        name: lambda reader, _, value=value: reader.push_shared(value)
        for name, value in shared.items()
    }


def _values() -> dict[str, Callable[[_Reader, Any], None]]:
    words = """BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8
    BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8"""
    return dict.fromkeys(words.split(), _Reader.push)


_STEPS: Mapping[str, Callable[[_Reader, Any], None]] = {
    "PROTO": lambda reader, _: None,
    "FRAME": lambda reader, _: None,
    "MARK": _Reader.mark,
    "POP": _Reader.drop,
    "POP_MARK": _Reader.drop_mark,
    "TUPLE": _Reader.tuple_since_mark,
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "FROZENSET": _Reader.frozen,
    "APPEND": lambda reader, _: reader.append([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.append(reader.since_mark()),
    "SETITEM": lambda reader, _: reader.put_items([reader.stack.pop(-2), reader.stack.pop()]),
    "SETITEMS": lambda reader, _: reader.put_items(reader.since_mark()),
    "ADDITEMS": _Reader.add,
    "GLOBAL": lambda reader, argument: reader.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _Reader.stack_name,
    "REDUCE": _Reader.call,
    "NEWOBJ": _Reader.call,
    "NEWOBJ_EX": _Reader.call_with_names,
    "BUILD": _Reader.build,
    "BINPUT": _Reader.remember,
    "LONG_BINPUT": _Reader.remember,
    "MEMOIZE": lambda reader, _: reader.remember(None),
    "BINGET": _Reader.recall,
    "LONG_BINGET": _Reader.recall,
    "BINPERSID": _Reader.persist,
    **_constants(),
    **_values(),
}
