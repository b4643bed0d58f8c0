"""`python -m jaxrl_logprob plan`: the bytes of every buffer of the loss segment, per device, as a table."""

import argparse
import math
import re
import sys

from .planner import mebibytes, Plan, plan


def main(argv: list[str] | None = None) -> int:
    """Exit status 0; 1 where the budget is not met, 2 for what makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_logprob", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "plan", help="which loop, which chunks, and the bytes of every buffer on a device"
    ).add_argument
    add("--tokens", type=int, default=32768, help="T, of the whole batch (default: 32768)")
    add("--vocab", type=int, default=151936, help="V (default: 151936)")
    add("--width", type=int, default=4096, help="D of hidden_states (default: 4096)")
    add("--token-shards", type=int, default=1, help="devices that split tokens: data x context (default: 1)")
    add("--vocab-shards", type=int, default=1, help="devices that split the vocabulary (default: 1)")
    add("--feature-shards", type=int, default=1, help="devices that split D of lm_head too: FSDP (default: 1)")
    add(
        "--sequence-parallel", action="store_true", help="the vocabulary's devices split hidden_states along tokens too"
    )
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--platform", default="tpu", choices=["cpu", "tpu", "gpu"])
    add("--budget", type=_bytes, help="for temporaries, per device, as 200MiB or 0.5GiB")
    args = parser.parse_args(argv)
    options = {k: v for k, v in vars(args).items() if k not in ("command", "tokens", "width", "vocab")}
    try:
        made = plan(args.tokens, args.width, args.vocab, **options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return show(made, f"T={args.tokens} D={args.width} V={args.vocab} {args.dtype} on {args.platform}, tokens over "
                      f"{args.token_shards} and vocabulary over {args.vocab_shards} devices")  # fmt: skip


def show(made: Plan, title: str) -> int:
    """Prints the plan; 0 where it fits."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print('The table needs rich: pip install "jaxrl-logprob[cli]".', file=sys.stderr)
        return 2
    table = Table(title=f"Per device: {title}", title_justify="left")
    for column in ("way", "buffer"):
        table.add_column(column)
    table.add_column("MiB", justify="right")
    for name, size in made.shared.items():
        table.add_row("every way", name, mebibytes(size))
    for way, buffers in made.buffers.items():
        table.add_section()
        for name, size in buffers.items():
            table.add_row(way, name, mebibytes(size))
        table.add_row(*(f"[bold]{text}[/bold]" for text in (way, "temporaries", mebibytes(made.temporaries(way)))))
    console = Console()
    console.print(table)
    outside = "vocabulary blocks" if made.blocks.vocab_outside else "tiles of tokens"
    console.print(f"Loop over {outside} outside; blocks of {made.blocks.rows} tokens x {made.blocks.columns} columns. "
                  f"{made.chunks}", highlight=False)  # fmt: skip
    if made.budget is not None:
        console.print(f"Budget {mebibytes(made.budget)} MiB: " + ("met." if made.fits else "not met."))
    for line in made.advice:
        console.print(f"- {line}", highlight=False)
    return 0 if made.fits else 1


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([KMGT]?)i?B?", text.strip(), re.I)
    if not match:
        raise argparse.ArgumentTypeError(f"a size such as 200MiB or 0.5GiB, got {text!r}")
    return math.floor(float(match[1]) * 1024 ** (" KMGT".index(match[2].upper()) if match[2] else 0))


if __name__ == "__main__":
    sys.exit(main())
