"""What the source text must not do: run code that it was sent, or listen for others unless told to."""

import ast
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("parallel", "comm", "attention", "moe", "engine", "launch")
FILES = sorted(path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py"))

#: modules that make objects, hence run code, out of bytes
PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
#: functions that run their argument, or unpickle what comes
RUNNERS = {"eval", "exec"}
METHODS = {
    "system", "popen", "send_pyobj", "recv_pyobj", "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
#: addresses of every interface
EVERYWHERE = ("0.0.0.0", "::", "[::]", "tcp://*", "tcp://0.0.0.0")


def unsafe(text: str) -> list[str]:
    """Lines of ``text`` that may run what they read, or listen everywhere."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module for _ in [0] if (node.module or "").split(".")[0] in PICKLERS]
        elif isinstance(node, ast.Call):
            names = _call(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(EVERYWHERE[3:]):
            names = [node.value]
        elif isinstance(node, ast.Constant) and node.value in EVERYWHERE[:3]:
            names = [str(node.value)]
        found += [f"{node.lineno}: {name}" for name in names]
    return found


def _call(node: ast.Call) -> list[str]:
    """What is wrong with a call."""
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    given = {word.arg: word.value for word in node.keywords}

    def says(word: str, value: object) -> bool:
        return isinstance(given.get(word), ast.Constant) and given[word].value == value  # type: ignore[union-attr]

    bad = name in RUNNERS or (last in METHODS and "." in name)
    bad |= name in ("torch.load", "load_state_dict_from_url") and not says("weights_only", True)
    bad |= name in ("np.load", "numpy.load") and not says("allow_pickle", False)
    bad |= name in ("yaml.load", "yaml.load_all") and "Safe" not in ast.unparse(node)
    bad |= name in ("yaml.unsafe_load", "yaml.full_load")
    bad |= any(says(word, True) for word in ("shell", "allow_pickle", "trust_remote_code"))
    if last in ("bind", "create_server") and node.args and isinstance(node.args[0], ast.Tuple):
        first = node.args[0].elts[0]
        bad |= isinstance(first, ast.Constant) and first.value == ""
    return [name] if bad else []


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_runs_what_it_reads_or_listens_everywhere(room):
    files = [path for path in FILES if path.parts[0] == room]
    assert files
    found = {str(path): bad for path in files if (bad := unsafe((ROOT / path).read_text(encoding="utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import marshal as m", "eval(x)", "exec(x)", "torch.load(f)",
        "torch.load(f, weights_only=False)", "np.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(t)",
        "yaml.load(t, Loader=yaml.Loader)", "yaml.full_load(t)", "os.system(x)", "subprocess.run(x, shell=True)",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)", "dist.all_gather_object(a, b)", "socket.recv_pyobj()",
        "sock.bind(('', 1))", "socket.create_server(('', 0))", "host = '0.0.0.0'", "host = '::'", "s.bind('tcp://*:1')",
    ],
)  # fmt: skip
def test_the_check_sees(text):
    assert unsafe(text) != []


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()", "re.compile(x)", "torch.load(f, weights_only=True)", "np.load(f, allow_pickle=False)",
        "yaml.load(t, Loader=yaml.SafeLoader)", "yaml.safe_load(t)", "sock.bind(('127.0.0.1', 0))", "sock.bind(path)",
    ],
)  # fmt: skip
def test_the_check_lets_pass(text):
    assert unsafe(text) == []
