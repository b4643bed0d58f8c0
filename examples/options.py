"""The command line of `grpo.py`: its options as a frozen dataclass. Imported, not run."""

import argparse
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxrl_logprob import losses


def parse_mesh(text: str) -> tuple[int, int, int]:
    """The sizes in "2x2x2"."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected data x context x vocab sizes, as 2x2x2, got {text!r}")
    data, context, vocab = map(int, text.split("x"))
    return data, context, vocab


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def one_of(names: Any) -> Callable[[str], str]:
    """One of these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def option(default: Any, help: str, parse: Callable[[str], Any] | None = None) -> Any:
    """A field of Config that is a command-line option."""
    return dataclasses.field(default=default, metadata={"help": help, "parse": parse or type(default)})


REMAT = {"layers": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


@dataclasses.dataclass(frozen=True)
class Config:
    """The command line: a field `max_grad_norm` is the option --max-grad-norm."""

    steps: int = option(4, "batches of completions", positive)
    prompts: int = option(4, "sums in a batch", positive)
    group_size: int = option(4, "completions of each sum", positive)
    max_new_tokens: int = option(12, "length at which a completion is cut off", positive)
    temperature: float = option(1.0, "of sampling, and of the log-probabilities", positive_number)
    recipe: str = option("grpo", f"one of {', '.join(losses.RECIPES)}", one_of(losses.RECIPES))
    epochs: int = option(2, "passes over each batch", positive)
    minibatches: int = option(1, "updates in a pass", positive)
    max_tokens: int = option(256, "tokens of a row of packed sequences", positive)
    rows: int = option(2, "rows of a micro-batch: gradients are added up over these", positive)
    learning_rate: float = option(1e-5, "of Adam", positive_number)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm", positive_number)
    entropy_coef: float = option(0.0, "times the mean entropy is added to the objective")
    kl_coef: float = option(0.0, "times the divergence from the model at the start is taken off it")
    importance: Literal["none", "tis", "mis"] = option(
        "none",
        "weights for the sampler's rounding: none, tis (truncated), mis (masked)",
        one_of(("none", "tis", "mis")),
    )
    remat: str = option("layers", f"what the backward pass computes again: {', '.join(REMAT)}", one_of(REMAT))
    seed: int = option(0, "of sums and completions")
    mesh: tuple[int, int, int] | None = option(
        None, "sizes of data x context x vocab; None is 2x2x2, or what fits fewer accelerators", parse_mesh
    )
    model: pathlib.Path | None = option(None, "Hugging Face folder, Llama or Qwen3; None is SmolLM2", pathlib.Path)
    run_dir: pathlib.Path | None = option(
        None, "folder for metrics, plots and checkpoints; None is runs/grpo-TIMESTAMP", pathlib.Path
    )
    checkpoint_every: int = option(10, "steps; one at the end besides; 0 for none", natural)

    @classmethod
    def from_command_line(cls, description: str, arguments: list[str] | None = None) -> "Config":
        """Parses the arguments of the process, or those given."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        for field in dataclasses.fields(cls):
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=field.metadata["parse"],
                default=field.default,
                help=field.metadata["help"],
                metavar=field.name.rpartition("_")[2].upper(),
            )
        return cls(**vars(parser.parse_args(arguments)))

    @property
    def accumulation(self) -> int:
        """Micro-batches that a minibatch could need: where every row has one completion."""
        return -(-self.prompts * self.group_size // (self.minibatches * self.rows))

    def of_the_run(self) -> dict[str, Any]:
        """What a run that goes on from a checkpoint must have in common with the one that wrote it."""
        free = ("steps", "run_dir", "checkpoint_every", "mesh", "remat", "rows", "model")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}
