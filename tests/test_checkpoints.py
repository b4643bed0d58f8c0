"""`examples/checkpoints.py`: states come back as they were, whole or not at all, and errors say what to do."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoints import Checkpoints
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from test_processes import free_port, launch


REPOSITORY = pathlib.Path(__file__).parents[1]
CONFIG = {"learning_rate": 1e-5, "clip": (0.2, 0.3)}
HOST = {"config": CONFIG, "note": "ü"}


class State(NamedTuple):
    model: nnx.Linear
    opt_state: Any


def make_state(shape: tuple[int, int] = (2, 4), width: int = 16) -> State:
    """A layer and Adam's moments, split over a mesh."""
    mesh = jax.make_mesh(shape, ("x", "y"))
    model: Any = nnx.Linear(8, width, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    state = State(model, optax.adam(1e-3).init(model))
    split = lambda x: jax.device_put(
        x, NamedSharding(mesh, PartitionSpec("x", "y") if x.ndim == 2 else PartitionSpec())
    )
    return jax.tree.map(split, state)


def filled(state: State, value: int) -> State:
    return jax.tree.map(lambda x: jax.device_put(jnp.full(x.shape, value, x.dtype), x.sharding), state)


def as_structs(state: State) -> State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(got: State, want: State, like: State) -> None:
    """The values and dtypes of one and the structure and shardings of another."""
    assert jax.tree.structure(got) == jax.tree.structure(like)
    for x, y, z in zip(*map(jax.tree.leaves, (got, want, like)), strict=True):
        assert x.dtype == y.dtype and x.sharding == z.sharding
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def restore(checkpoints: Checkpoints, like: Any, **kwargs: Any) -> tuple[int, Any, dict[str, Any]]:
    restored = checkpoints.restore(like, **kwargs)
    assert restored is not None
    return restored


def digits(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """A folder with steps 3 and 7."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (3, 7):
            checkpoints.save(step, filled(make_state(), step), HOST)
    return folder


@pytest.fixture
def folder(two_steps, tmp_path):
    return pathlib.Path(shutil.copytree(two_steps, tmp_path / "checkpoints"))


@pytest.mark.parametrize("to_like", [lambda state: state, as_structs], ids=["arrays", "structs"])
def test_round_trip(to_like, tmp_path):
    state = make_state()
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        assert checkpoints.restore(state) is None
        checkpoints.save(0, state, HOST)
    with Checkpoints(tmp_path / "new" / "folder") as checkpoints:
        step, restored, host = restore(checkpoints, to_like(filled(state, 5)), config=CONFIG)
    assert step == 0 and host == json.loads(json.dumps(HOST))
    assert_same(restored, state, state)
    hidden = restored.model(jnp.ones((1, 8), jnp.bfloat16))
    np.testing.assert_array_equal(hidden, state.model(jnp.ones((1, 8), jnp.bfloat16)))


@pytest.mark.parametrize("shape", [(8, 1), (1, 1)])
def test_other_mesh(shape, two_steps):
    like = make_state(shape)
    with Checkpoints(two_steps) as checkpoints:
        step, restored, _ = restore(checkpoints, like)
    assert step == 7
    assert_same(restored, filled(like, 7), like)


def test_keeps_the_newest(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in range(5):
            checkpoints.save(step, state, HOST)
            assert digits(tmp_path) == [str(kept) for kept in range(max(0, step - 2), step + 1)]


def test_keep_one(tmp_path):
    with pytest.raises(ValueError, match="`keep` must be at least 1, got 0"):
        Checkpoints(tmp_path, keep=0)


def test_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpoints(pathlib.Path("here")) as checkpoints:
        checkpoints.save(1, make_state(), HOST)
    assert digits(tmp_path / "here") == ["1"]


def test_save_before_restore(folder):
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(ValueError, match="holds checkpoints of another run: `restore` them, or give another"):
            checkpoints.save(8, make_state(), HOST)
        checkpoints.restore(make_state())
        with pytest.raises(ValueError, match="`step` must be greater than 7, the newest in .*, got 7"):
            checkpoints.save(7, make_state(), HOST)
    assert digits(folder) == ["3", "7"]


def damage(path: pathlib.Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 if how == "half" else 0])


def files_of(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def restore_torn(folder: pathlib.Path, copy: pathlib.Path) -> None:
    """Damages each file of step 7 in turn, in a copy. Where the step still comes back, it is as it was."""
    state = make_state()
    for name in files_of(folder / "7"):
        for how in ("delete", "half", "empty"):
            shutil.copytree(folder, copy)
            damage(copy / "7" / name, how)
            before = files_of(copy)
            with Checkpoints(copy) as checkpoints:
                try:
                    step, restored, host = restore(checkpoints, state, config=CONFIG)
                except ValueError as error:
                    print(name, how, error, sep="\t", flush=True)
                    with pytest.raises(ValueError, match="holds checkpoints of another run"):
                        checkpoints.save(8, state, HOST)
                    assert files_of(copy) == before
                    shutil.rmtree(copy / "7")
                    assert restore(checkpoints, state, config=CONFIG)[0] == 3
                else:
                    assert step == 7 and host["note"] == "ü"
                    assert_same(restored, filled(state, 7), state)
            shutil.rmtree(copy)


def test_torn(two_steps, tmp_path):
    """In a process of its own: a failed read leaves tasks behind in Orbax, which pytest lays to other tests."""
    program = f"import conftest, test_checkpoints as t; t.restore_torn(t.pathlib.Path({str(two_steps)!r}), "
    program += f"t.pathlib.Path({str(tmp_path / 'copy')!r}))"
    folders = [str(REPOSITORY / name) for name in ("tests", "examples", ".")]
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": ":".join(folders)}
    )
    assert result.returncode == 0, result.stderr
    refused = [line.split("\t") for line in result.stdout.splitlines()]
    data = next(name for name in files_of(two_steps / "7") if name.startswith("state/d/"))
    for name in ("host/metadata", "state/_METADATA", "state/manifest.ocdbt", data):
        assert [how for other, how, _ in refused if other == name] == ["delete", "half", "empty"]
    message = "copy/7 is damaged, and nothing was deleted or overwritten. Remove that folder to continue from step 3."
    assert all(message in error for *_, error in refused)


def test_torn_and_alone(folder):
    shutil.rmtree(folder / "3")
    shutil.rmtree(folder / "7" / "state")
    with Checkpoints(folder) as checkpoints, pytest.raises(ValueError, match="start anew: no step before it is there"):
        checkpoints.restore(make_state())


def test_other_model(two_steps):
    with Checkpoints(two_steps) as checkpoints:
        message = r"7 is of another model: \.model\.bias\.value is bfloat16\[32\] in this one, bfloat16\[16\] in the"
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(make_state(width=32))
        with pytest.raises(ValueError, match=r"\.opt_state\[0\]\.count is missing in this one, int32\[\] in the check"):
            checkpoints.restore(State(make_state().model, None))
        with pytest.raises(ValueError, match=r"\['w'\] is float32\[2\] in this one, missing in the checkpoint"):
            checkpoints.restore({"w": jnp.ones(2)})


def test_other_config(two_steps):
    with Checkpoints(two_steps) as checkpoints:
        other = {"learning_rate": 1e-3, "clip": [0.2, 0.3], "seed": 0}
        message = "learning_rate got 0.001, saved 1e-05; seed got 0, saved nothing"
        with pytest.raises(ValueError, match=f"checkpoints/7 is of a run with another config: {message}"):
            checkpoints.restore(make_state(), config=other)
        assert checkpoints.restore(make_state(), config={"clip": (0.2, 0.3)})[0] == 7


def test_other_program(tmp_path):
    (tmp_path / "5" / "default").mkdir(parents=True)
    message = "5 isn't a checkpoint of this program, of state and host: it holds default"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(make_state())
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="isn't a folder of checkpoints of this program: it holds 'notes.txt'"):
        Checkpoints(tmp_path)


def test_half_written_is_ignored(folder):
    shutil.copytree(folder / "7", folder / "9.orbax-checkpoint-tmp")
    (folder / "9.orbax-checkpoint-tmp" / "host" / "metadata").unlink()
    state = make_state()
    with Checkpoints(folder) as checkpoints:
        step, restored, _ = restore(checkpoints, state)
        assert step == 7
        assert_same(restored, filled(state, 7), state)
        assert "9.orbax-checkpoint-tmp" in digits(folder)
        checkpoints.save(8, state, HOST)
    assert digits(folder) == ["7", "8"]


SAVE_FOREVER = """
import itertools, pathlib, sys
import jax.numpy as jnp
from checkpoints import Checkpoints
value = lambda step: {"a": jnp.full(1000, step), "b": [jnp.full((3, 5), step)]}
with Checkpoints(pathlib.Path(sys.argv[1])) as checkpoints:
    first, state, host = checkpoints.restore(value(0)) or (0, value(0), {"config": {}, "step": 0})
    assert host["step"] == first and (state["a"] == first).all() and (state["b"][0] == first).all()
    for step in itertools.count(first + 1):
        checkpoints.save(step, value(step), {"config": {}, "step": step})
        print(step, flush=True)
"""


@pytest.mark.parametrize("kills", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_killed(kills, tmp_path):
    """Each process goes on where the one before it was killed: at least from the last step that it said was saved."""
    value = {"a": jnp.zeros(1000, jnp.int32), "b": [jnp.zeros((3, 5), jnp.int32)]}
    rng, last = np.random.default_rng(time.time_ns()), 0
    for _ in range(kills):
        command = [sys.executable, "-W", "error", "-c", SAVE_FOREVER, str(tmp_path)]
        env = {"PYTHONPATH": str(REPOSITORY / "examples"), "JAX_PLATFORMS": "cpu"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
            said = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            rest, errors = process.communicate()
        said = (said + rest).split()
        assert said and int(said[0]) in (last + 1, last + 2), errors  # One may be saved and not yet said.
        with Checkpoints(tmp_path) as checkpoints:
            step, state, host = restore(checkpoints, value)
        last = int(said[-1])
        assert step in (last, last + 1) and host["step"] == step
        assert all((np.asarray(x) == step).all() for x in jax.tree.leaves(state))


IN_PROCESSES = """
import pathlib, sys
import jax, numpy as np
from checkpoints import Checkpoints
from jax.sharding import NamedSharding, PartitionSpec
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
sharding = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec("x"))
make = lambda step: {"w": jax.make_array_from_callback((8,), sharding, lambda index: np.full(8, step)[index])}
with Checkpoints(pathlib.Path(sys.argv[1])) as checkpoints:
    assert checkpoints.restore(make(0)) is None
    for step in range(3):
        checkpoints.save(step, make(step), {"config": {}})
with Checkpoints(pathlib.Path(sys.argv[1])) as checkpoints:
    step, state, host = checkpoints.restore(make(0), config={})
    assert step == 2 and state["w"].sharding == sharding
    assert all((np.asarray(shard.data) == 2).all() for shard in state["w"].addressable_shards)
    checkpoints.save(3, make(3), {"config": {}})
"""


@pytest.mark.slow
def test_two_processes(tmp_path, monkeypatch):
    program = f"import sys; sys.path.append({str(REPOSITORY / 'examples')!r})\n{IN_PROCESSES}"
    address = f"localhost:{free_port()}"
    launch(*(["-c", program, tmp_path, address, process] for process in range(2)))
    assert digits(tmp_path) == ["2", "3"]
    with Checkpoints(tmp_path) as checkpoints:
        step, state, _ = restore(checkpoints, {"w": jnp.zeros(8, jnp.int32)})
    assert step == 3 and (np.asarray(state["w"]) == 3).all()
