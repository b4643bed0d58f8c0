"""One import path, `jaxrl_logprob.sharding`: of a wheel, an sdist, an editable install, a checkout, a type checker."""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
IMPORT = (
    "import jaxrl_logprob, jaxrl_logprob.sharding as s, sys; from jaxrl_logprob.sharding import MeshAxes; "
    "assert s.MeshAxes is jaxrl_logprob.MeshAxes and 'sharding' not in sys.modules; print(s.__file__)"
)


def run(*args: str, cwd: Path, path: Path | None = None) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def import_from(path: Path, cwd: Path) -> Path:
    """The file that `jaxrl_logprob.sharding` comes from, with `path` first."""
    return Path(run("-c", IMPORT, cwd=cwd, path=path))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the tracked tree, symbolic link included."""
    to = tmp_path_factory.mktemp("checkout")
    for name in ("jaxrl_logprob", "sharding"):
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    return to


def build(target: str, source: Path, to: Path) -> Path:
    run("-m", "hatchling", "build", "-t", target, "-d", str(to), cwd=source)
    (built,) = to.iterdir()
    return built


def python_files(names) -> set[str]:
    return {n for n in names if n.startswith("jaxrl_logprob/")}


def test_the_link_is_relative():
    assert os.readlink(ROOT / "jaxrl_logprob" / "sharding") == "../sharding"


@pytest.mark.slow
def test_plain_checkout(checkout, tmp_path):
    assert import_from(checkout, tmp_path) == checkout / "jaxrl_logprob" / "sharding" / "__init__.py"


def test_wheel(checkout, tmp_path):
    wheel = zipfile.ZipFile(build("wheel", checkout, tmp_path / "dist"))
    names = wheel.namelist()
    assert "jaxrl_logprob/sharding/__init__.py" in names and "jaxrl_logprob/py.typed" in names
    assert not [n for n in names if n.startswith(("sharding/", "tests/", "examples/"))]
    wheel.extractall(tmp_path / "site")
    assert import_from(tmp_path / "site", tmp_path) == tmp_path / "site" / "jaxrl_logprob" / "sharding" / "__init__.py"


@pytest.mark.slow
def test_wheel_from_sdist_is_the_wheel(checkout, tmp_path):
    with tarfile.open(build("sdist", checkout, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert import_from(source, tmp_path) == source / "jaxrl_logprob" / "sharding" / "__init__.py"
    of = lambda source, to: python_files(zipfile.ZipFile(build("wheel", source, to)).namelist())
    assert of(source, tmp_path / "a") == of(checkout, tmp_path / "b")


@pytest.mark.slow
def test_editable(checkout, tmp_path):
    wheel = zipfile.ZipFile(build("wheel:editable", checkout, tmp_path / "dist"))
    wheel.extractall(tmp_path / "site")
    (pth,) = (tmp_path / "site").glob("*.pth")
    # The first path that a site folder adds comes after those of this environment, which has the library too.
    assert Path(pth.read_text().strip()) == checkout
    assert import_from(Path(pth.read_text().strip()), tmp_path).is_relative_to(checkout)


def test_pyright_resolves_it(checkout, tmp_path):
    (checkout / "use.py").write_text(
        "from jaxrl_logprob.sharding import MeshAxes\nimport jaxrl_logprob as jrl\n"
        "axes: MeshAxes = jrl.MeshAxes(vocab='v')\nreveal_type(axes.vocab)\n"
    )
    out = run("-m", "pyright", "--pythonpath", sys.executable, "use.py", cwd=checkout)
    assert "0 errors" in out and 'Type of "axes.vocab" is "str | tuple' in out


def imports(file: Path) -> set[str]:
    """The modules that a file imports by an absolute name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("folder", ["jaxrl_logprob", "sharding", "tests", "examples", "benchmarks"])
def test_nothing_imports_bare_sharding(folder):
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        assert not [m for m in imports(file) if m.split(".")[0] == "sharding"], file


def test_sharding_knows_nothing_of_the_rest():
    """No import of jaxrl_logprob, absolute or relative."""
    for file in (ROOT / "sharding").glob("*.py"):
        assert not [m for m in imports(file) if m.startswith("jaxrl_logprob")], file
        tree = ast.parse(file.read_text())
        relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        assert all(n.level == 1 for n in relative), file


def test_importing_the_library_does_not_import_flax(tmp_path):
    names = "{'flax', 'optax', 'chex', 'jaxrl_logprob.heads'}"
    code = f"import jaxrl_logprob, sys; print(sorted({names} & set(sys.modules)))"
    out = run("-c", code, cwd=tmp_path, path=ROOT)
    assert out == "[]"
