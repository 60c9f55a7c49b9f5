"""The options of XLA under which tests run, beside those that are given in XLA_FLAGS.

The suite's programs run a few times each, so they are not optimised, and the older emitters build
no MLIR context for every fusion. Their code is one LLVM module: of the 32 that XLA cuts a program
into for as many threads, each costs time of its own, and pytest's workers need the cores.
"""

OPTIONS = (
    "--xla_backend_optimization_level=0",
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    "--xla_cpu_parallel_codegen_split_count=1",
)


def with_options(flags: str) -> str:
    """Returns XLA_FLAGS: what is given, then each of OPTIONS that it does not set itself."""
    words = flags.split()
    names = {word.partition("=")[0] for word in words}
    return " ".join([*words, *(o for o in OPTIONS if o.partition("=")[0] not in names)])
