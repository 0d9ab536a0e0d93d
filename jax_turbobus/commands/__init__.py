"""What `python -m jax_turbobus <command>` runs: one module a command.

Each module has `add_arguments(parser)` and `run(args) -> int` (the exit status).
"""

# name -> (module, one line of help). Modules are imported only when asked for.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "train a small mixture of experts, its optimizer on the host"),
    "topo": ("topo", "show this machine's links, or those of a topology file"),
    "volume": ("volume", "bytes each expert-exchange schedule moves on every link"),
    "bench": ("bench", "measure experts, offload or the scheduler against peers"),
    "sim": ("sim", "run the scheduler in virtual time over a topology file"),
    "doctor": ("doctor", "say what works on this machine, what does not, and why"),
    "profile": ("profile", "measure this machine's GPU links and keep the result"),
    "top": ("top", "show live use of every GPU's host link"),
}
