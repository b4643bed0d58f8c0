"""Checkpoints of a run: its state as jax.Arrays, and beside it what the host knows, whole after a kill at any moment.

    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        first, actor, _ = checkpoints.restore(actor, config=config) or (0, actor, {})
        for step in range(first, steps):
            actor = update(actor)
            checkpoints.save(step + 1, actor, {"config": config})  # Where to go on from.

Orbax writes each step to a temporary folder, which it renames when all is there; a half-written one is thus never
read. All processes of a program call these methods, on a folder that all of them see.
"""

import json
import pathlib
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp


TEMPORARY = ".orbax-checkpoint-tmp"
ITEMS = ("state", "host")


class Checkpoints:
    """The newest `keep` steps of one run, in a folder that holds nothing else."""

    def __init__(self, folder: pathlib.Path, *, keep: int = 2) -> None:
        """Opens the folder, or makes it.

        Raises:
          ValueError: the folder holds something else than steps.
        """
        if keep < 1:
            raise ValueError(f"`keep` must be at least 1, got {keep}")
        self.folder = folder.absolute()
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []
        strange = [name for name in names if not name.partition(TEMPORARY)[0].isdecimal()]
        if strange:
            raise ValueError(
                f"{self.folder} isn't a folder of checkpoints of this program: it holds {strange[0]!r}. "
                "Give an empty folder, or one that does not exist"
            )
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        # Made here and not above: they start JAX's devices.
        handlers: Any = dict(zip(ITEMS, (ocp.StandardCheckpointHandler(), ocp.JsonCheckpointHandler())))
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        self._is_ours = self._manager.latest_step() is None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Writes `state`, a pytree of jax.Arrays, and `host`, a dictionary of JSON whose "config" describes the run.
        When it returns, the step is whole on disk, and those beyond the newest `keep` are gone.

        Raises:
          ValueError: the folder holds checkpoints that this run did not start from, or a later step.
        """
        if not self._is_ours:
            raise ValueError(f"{self.folder} holds checkpoints of another run: `restore` them, or give another folder")
        if jax.process_index() == 0:
            for path in self.folder.glob(f"*{TEMPORARY}*"):
                shutil.rmtree(path)
        items = {"state": ocp.args.StandardSave(_flatten(state)), "host": ocp.args.JsonSave(host)}
        if not self._manager.save(step, args=ocp.args.Composite(**items)):
            latest = self._manager.latest_step()
            raise ValueError(f"`step` must be greater than {latest}, the newest in {self.folder}, got {step}")

    def restore(self, like: Any, *, config: dict[str, Any] | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest step, its state and its host data; None where there is no checkpoint.

        Args:
          like: the state's pytree, of jax.Arrays or jax.ShapeDtypeStructs; gives each array its sharding, which need
            not be the one it was saved with.
          config: the fields that must be as in the "config" of the saved host data; leave out those that may change.

        Raises:
          ValueError: the newest checkpoint is damaged, of another model, of another config or of another program.
        """
        self._manager.reload()
        step = self._manager.latest_step()
        if step is None:
            self._is_ours = True
            return None
        folder = self.folder / str(step)
        if not any((folder / item).exists() for item in ITEMS) and any(folder.iterdir()):
            names = ", ".join(sorted(path.name for path in folder.iterdir()))
            raise ValueError(f"{folder} isn't a checkpoint of this program, of {' and '.join(ITEMS)}: it holds {names}")
        host = self._read(step, "host", ocp.args.JsonRestore())
        _check_config(folder, host.get("config", {}), config or {})
        wanted = _flatten(like)
        saved = self._shapes(step)
        for name in [*wanted, *saved]:
            here, there = (_describe(arrays.get(name)) for arrays in (wanted, saved))
            if here != there:
                raise ValueError(
                    f"{folder} is of another model: {name} is {here} in this one, {there} in the checkpoint"
                )
        structs = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in wanted.items()}
        arrays = self._read(step, "state", ocp.args.StandardRestore(structs))
        self._is_ours = True
        return step, jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted]), host

    def _read(self, step: int, item: str, args: ocp.args.CheckpointArgs) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except (jax.errors.JaxRuntimeError, MemoryError):  # The device's or the host's fault, not the checkpoint's.
            raise
        except Exception as error:
            raise self._damaged(step, str(error)) from error

    def _shapes(self, step: int) -> dict[str, Any]:
        """The saved arrays' metadata, by name."""
        try:
            metadata = self._manager.item_metadata(step)["state"]
        except Exception as error:
            raise self._damaged(step, str(error)) from error
        if metadata is None:
            raise self._damaged(step, "state/_METADATA is missing")
        return dict(metadata.items())

    def _damaged(self, step: int, cause: str) -> ValueError:
        before = max((other for other in self._manager.all_steps() if other < step), default=None)
        remedy = "start anew: no step before it is there" if before is None else f"continue from step {before}"
        return ValueError(
            f"{self.folder / str(step)} is damaged, and nothing was deleted or overwritten. "
            f"Remove that folder to {remedy}. The cause: {cause.partition(chr(10))[0][:200]}"
        )


def _flatten(state: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def _describe(array: Any) -> str:
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"


def _check_config(folder: pathlib.Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    got = json.loads(json.dumps(config))
    differences = [
        f"{name} got {value!r}, saved {saved[name]!r}" if name in saved else f"{name} got {value!r}, saved nothing"
        for name, value in got.items()
        if name not in saved or saved[name] != value
    ]
    if differences:
        raise ValueError(f"{folder} is of a run with another config: {'; '.join(differences)}")
