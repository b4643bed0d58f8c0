"""What an optimised HLO program does, loops counted with their trips: multiply-adds and bytes of collectives.

XLA's own cost analysis counts the body of a loop once. A loop whose trip count depends on data (here: one step for each
tile of rows that count) is given the trips that the caller says.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass


BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


@dataclass
class Cost:
    """Of one run of a program or of a computation in it, per device."""

    multiply_adds: float = 0.0
    collective_bytes: float = 0.0
    collectives: float = 0.0

    def add(self, other: "Cost", times: float) -> None:
        self.multiply_adds += times * other.multiply_adds
        self.collective_bytes += times * other.collective_bytes
        self.collectives += times * other.collectives


def cost(text: str, dynamic_trips: Callable[[str], float] = lambda body: 1.0) -> Cost:
    """The cost of the entry computation of `compiled.as_text()`.

    Args:
        dynamic_trips: how often a loop with this body runs, where its condition does not tell.
    """
    bodies = {
        match[2]: (bool(match[1]), match[3].splitlines())
        for match in re.finditer(r"^(ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.S | re.M)
    }
    known: dict[str, Cost] = {}

    def of(name: str) -> Cost:
        if name not in known:
            known[name] = Cost()
            shapes: dict[str, str] = {}
            for line in bodies[name][1]:
                if match := INSTRUCTION.match(line):
                    shapes[match[1]] = match[2]
                    _add_instruction(known[name], match, shapes, of, bodies, dynamic_trips)
        return known[name]

    return of(next(name for name, (entry, _) in bodies.items() if entry))


def _add_instruction(total: Cost, match: re.Match, shapes: dict[str, str], of, bodies, dynamic_trips) -> None:
    _, shape, kind, rest = match.groups()
    called = lambda attribute: re.findall(rf"{attribute}=%?([\w.\-]+)", rest)
    if kind == "while":
        condition = "\n".join(bodies[called("condition")[0]][1])
        trips = re.search(r"known_trip_count[^\d]*(\d+)", rest) or re.search(r"s32\S* constant\((\d+)\)", condition)
        total.add(
            of(called("body")[0]), float(trips[1]) if trips else dynamic_trips("\n".join(bodies[called("body")[0]][1]))
        )
    elif kind == "conditional":
        branches = called("true_computation") + called("false_computation")
        if listed := re.search(r"branch_computations=\{([^}]*)\}", rest):
            branches += [name.strip().lstrip("%") for name in listed[1].split(",")]
        total.add(max((of(b) for b in branches), key=lambda c: (c.multiply_adds, c.collective_bytes)), 1)
    elif kind in ("dot", "convolution"):
        operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])[:2]
        inner = ARRAY.findall(rest)[:2]
        sizes = [math.prod(_dims(d)) for _, d in inner] if len(inner) == 2 else [_elements(shapes[o]) for o in operands]
        # Of a product of (m, k) and (k, n), the three sizes multiply to (m k n)²; of b such products, to b³ times that.
        batch = re.search(r"lhs_batch_dims=\{([\d,]+)\}", rest)
        lhs = ARRAY.findall(shapes[operands[0]])[0][1] if batch else ""
        batches = math.prod(_dims(lhs)[d] for d in _dims(batch[1])) if batch else 1
        total.multiply_adds += math.sqrt(sizes[0] * sizes[1] * _elements(shape) / batches)
    elif re.fullmatch(rf"(?:{COLLECTIVES})(?:-start)?", kind):
        # An asynchronous start has its operands in its result too: the last array is the result.
        arrays = ARRAY.findall(shape)
        counted = arrays[len(arrays) // 2 :] if kind.endswith("-start") and len(arrays) > 1 else arrays
        total.collective_bytes += sum(BYTES[t] * math.prod(_dims(d)) for t, d in counted)
        total.collectives += 1
    else:
        for name in called("calls") + (called("to_apply") if kind == "call" else []):
            if name in bodies:
                total.add(of(name), 1)


def _dims(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _elements(shape: str) -> int:
    return sum(math.prod(_dims(d)) for _, d in ARRAY.findall(shape))
